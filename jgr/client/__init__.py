# SPDX-License-Identifier: Apache-2.0
"""Python's way to a model: the same calls and errors for an engine of this process and for a server."""
