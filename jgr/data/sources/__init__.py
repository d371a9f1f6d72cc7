# SPDX-License-Identifier: Apache-2.0
"""Raw datasets as others publish them: one file for each format, with functions that yield typed records."""
