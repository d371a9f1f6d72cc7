# SPDX-License-Identifier: Apache-2.0
"""From bytes to requests and back."""
