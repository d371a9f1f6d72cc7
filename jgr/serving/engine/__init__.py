# SPDX-License-Identifier: Apache-2.0
"""What every engine has: the life of a request, threads, metrics, compilation."""
