# SPDX-License-Identifier: Apache-2.0
"""Item features on their way to the model (FLAME's PDA): stores, the cache in this process, and records on the device.

`schema` defines a record, `extraction` makes records from metadata, `stores` keep them. `states` and `memory` decide
what the cache does (pure), `cache` drives them with threads, `numa` binds threads, `unpacking` reads records on the
device.
"""
