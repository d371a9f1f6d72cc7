# SPDX-License-Identifier: Apache-2.0
"""What requests look like: workloads, traces, an open-loop client; for the live server and for simulation."""
