# SPDX-License-Identifier: Apache-2.0
"""Quality: ranking metrics and the baselines that a model has to beat."""
