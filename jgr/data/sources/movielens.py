# SPDX-License-Identifier: Apache-2.0
"""Reads MovieLens 100K and 1M, as GroupLens publishes them.

ML-1M can also be read without `ratings.dat` from `sequences.txt`, lines of `user movie movie ...` oldest first and
without times; or from the first half of `ratings.dat`, users 1 to 2999 with times. Every rating is an event,
whether high or low.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from jgr.data.sources.records import (
    Counts,
    Event,
    Item,
    Raw,
    Source,
    as_time,
    fields_of,
    find,
    find_optional,
    parsed,
    user_lines,
)

GENRES_100K = (
    "unknown|Action|Adventure|Animation|Children's|Comedy|Crime|Documentary|Drama|Fantasy|Film-Noir|Horror|"
    "Musical|Mystery|Romance|Sci-Fi|Thriller|War|Western"
).split("|")
_YEAR = re.compile(r" \((\d{4})\)$")


def _open_100k(folder: Path) -> Raw:
    return Raw(((find(folder, "u.data"), _ratings_100k),), (find(folder, "u.item"), _movies_100k))


def _ratings_100k(path: Path) -> Iterator[tuple[int, Event]]:
    return parsed(path, lambda line: [_rating(fields_of(line, "\t", 4))])


def _movies_100k(path: Path) -> Iterator[tuple[int, Item]]:
    def parse(line: bytes) -> list[Item]:
        fields = fields_of(line, "|", 5 + len(GENRES_100K), "latin-1")
        if not set(fields[5:]) <= {"0", "1"}:
            raise ValueError(f"genres must be 0 or 1, found {'|'.join(fields[5:])}")
        genres = [genre for genre, flag in zip(GENRES_100K, fields[5:], strict=True) if flag == "1"]
        return [_movie(fields[0], fields[1], genres)]

    return parsed(path, parse)


def _open_1m(folder: Path) -> Raw:
    movies = (find(folder, "movies.dat"), _movies_1m)
    ratings = find_optional(folder, "ratings.dat")
    if ratings is not None:
        return Raw(((ratings, _ratings_1m),), movies)
    return Raw(((find(folder, "ratings.dat", "sequences.txt"), user_lines),), movies)


def _open_1m_half(folder: Path) -> Raw:
    ratings = find(folder, "ratings_users_1-2999.dat")
    return Raw(((ratings, _ratings_1m),), (find(folder, "movies.dat"), _movies_1m))


def _ratings_1m(path: Path) -> Iterator[tuple[int, Event]]:
    return parsed(path, lambda line: [_rating(fields_of(line, "::", 4))])


def _movies_1m(path: Path) -> Iterator[tuple[int, Item]]:
    def parse(line: bytes) -> list[Item]:
        movie_id, title, genres = fields_of(line, "::", 3, "latin-1")
        return [_movie(movie_id, title, genres.split("|"))]

    return parsed(path, parse)


def _rating(fields: list[str]) -> Event:
    user_id, movie_id, rating, time = fields
    if rating not in ("1", "2", "3", "4", "5"):
        raise ValueError(f"a rating must be 1 to 5, found {rating!r}")
    return Event(user_id, movie_id, as_time(time))


def _movie(movie_id: str, title: str, genres: list[str]) -> Item:
    metadata: dict[str, object] = {"title": title, "genres": genres}
    year = _YEAR.search(title)
    if year:
        metadata["year"] = int(year[1])
    return Item(movie_id, metadata)


_ML_1M = Counts(6040, 3706, 1_000_209)
SOURCES = {
    "movielens-100k": Source(_open_100k, raw=Counts(943, 1682, 100_000)),
    "movielens-1m": Source(_open_1m, raw=_ML_1M),
    "movielens-1m-half": Source(_open_1m_half, raw=Counts(2999, 3615, 487_650)),
    # As in SASRec, BERT4Rec and gSASRec: movies with at least five ratings, with their original ids.
    "movielens-1m-sasrec": Source(_open_1m, raw=_ML_1M, kept=Counts(6040, 3416, 999_611), min_item=5),
}
