# SPDX-License-Identifier: Apache-2.0
"""Pure state machines that decide what runs next. No threads, no I/O, no clock, no jax."""
