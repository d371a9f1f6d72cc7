# SPDX-License-Identifier: Apache-2.0
"""The named configurations: `--config=industrial` is industrial.py. Installed as the package jgr.configs."""
