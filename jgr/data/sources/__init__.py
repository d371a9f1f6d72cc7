# SPDX-License-Identifier: Apache-2.0
"""Raw datasets as others publish them: a file a form, each a few functions that yield typed records."""
