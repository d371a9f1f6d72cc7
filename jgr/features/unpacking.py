# SPDX-License-Identifier: Apache-2.0
"""Reads feature records on the device, where n records are one input of 32-bit words."""

from __future__ import annotations

import jax
import numpy as np

from jgr.features.schema import Schema
from jgr.models.words import WORD, seen_as


def unpack_records(schema: Schema, records: jax.Array) -> dict[str, jax.Array]:
    """Each feature by name, [n, width] of its dtype; for jitted functions. records: [n, record_bytes / 4] uint32."""
    features = {}
    fields = schema.dtype.fields
    assert fields is not None
    for feature in schema.features:
        dtype, offset = np.dtype(feature.dtype), int(fields[feature.name][1])
        first, last = offset // WORD, -(-(offset + feature.width * dtype.itemsize) // WORD)
        numbers = seen_as(records[:, first:last], dtype)
        skipped = offset % WORD // dtype.itemsize
        features[feature.name] = numbers[:, skipped : skipped + feature.width]
    return features
