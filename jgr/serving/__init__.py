# SPDX-License-Identifier: Apache-2.0
"""The live engine: request types, the asyncio driver, executors and the HTTP server."""
