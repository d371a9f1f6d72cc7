# SPDX-License-Identifier: Apache-2.0
"""Traffic for the live server and for simulation: workloads, traces, and an open-loop client."""
