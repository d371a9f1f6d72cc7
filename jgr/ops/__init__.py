# SPDX-License-Identifier: Apache-2.0
"""Ops: one folder each, holding the reference, the fast forms and the cases that test and time them."""
