# SPDX-License-Identifier: Apache-2.0
"""jgr: a JAX serving engine for generative recommenders. Importing it touches no device."""

__version__ = "0.1.0"
