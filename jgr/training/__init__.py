# SPDX-License-Identifier: Apache-2.0
"""Training of the models that jgr serves, and the making of semantic ids."""
