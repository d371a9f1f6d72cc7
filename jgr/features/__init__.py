# SPDX-License-Identifier: Apache-2.0
"""Items' features on their way to the model (FLAME's PDA): stores, the cache in this process, and one packed transfer.

`schema` says what a record is, `stores` where records lie, `states`, `lru` and `bucket` what the cache decides (pure),
`cache` drives it with threads, `numa` says where threads should run, and `packed` takes arrays to the device.
"""
