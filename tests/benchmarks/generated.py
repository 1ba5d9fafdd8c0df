"""A small file in RecBole's atomic format whose ratings can be learned: each user likes some genres, each item has one."""

from pathlib import Path

import numpy as np


def write_interactions(path: Path, *, users: int = 60, items: int = 40, most: int = 40, seed: int = 0) -> Path:
    """Write events of `users` users with 2 to `most` events each, some sharing a timestamp; returns `path`."""
    random = np.random.default_rng(seed)
    taste, genre = random.integers(0, 2, (users, 4)), random.integers(0, 4, items)
    rows = []
    for user in range(users):
        time = int(random.integers(0, 5000))
        for _ in range(int(random.integers(2, most + 1))):
            item = int(random.integers(items))
            rating = (4 if taste[user, genre[item]] else 2) + int(random.integers(0, 2))
            rows.append((f"u{user}", f"i{item}", rating, time))
            time += int(random.choice([0, 1, 7, 200]))
    random.shuffle(rows)
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float", *("\t".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
