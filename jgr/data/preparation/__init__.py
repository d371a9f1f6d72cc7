# SPDX-License-Identifier: Apache-2.0
"""From downloaded files to a prepared dataset."""
