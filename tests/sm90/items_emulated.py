"""Run the backward's work-list kernel in the emulator and print what it made, one JSON line a case.

    python -m tests.sm90.items_emulated '[{"lengths": [100, 31], "queries": 70}, ...]'

Keys: ``lengths``; ``queries``, one number or one a sequence; ``dtype`` of the offsets; ``serial``; ``keys`` of an item; ``slack``, rows
past the last sequence; ``scales``, bytes of scales. Gradients and scales are filled with ones before. A process of its own: the emulated
architecture is fixed at import.
"""

import json
import sys

import torch

from tests.emulator import api


def main(text: str) -> None:
    for case in json.loads(text):
        lengths, queries = case["lengths"], case["queries"]
        tokens, dtype = sum(lengths) + case.get("slack", 0), getattr(torch, case.get("dtype", "int32"))
        offsets = lambda x: torch.tensor([0, *x]).cumsum(0).to(dtype)  # noqa: E731, B023
        gradients = [torch.ones(tokens, 64, dtype=torch.uint8) for _ in range(2)]
        scales = [torch.ones(case["scales"], dtype=torch.uint8) for _ in range(2)] if "scales" in case else []

        def call(case=case, lengths=lengths, queries=queries, offsets=offsets, gradients=gradients, scales=scales):
            from lp_fa4.sm90 import backward_items as module

            jagged = isinstance(queries, list)
            return module.work_items(
                "sm_90a",
                offsets(lengths),
                offsets(queries if jagged else lengths),
                gradients,
                scales,
                queries=None if jagged else queries,
                serial=case.get("serial", False),
                keys=case.get("keys", module.KEY_TILE),
            )

        (items, state), _ = api.call_under(call, "sm_90a", api.Schedule("pct", 1), check=True)
        zeroed = [int((x == 0).all(-1).sum()) if x.dim() == 2 else int((x == 0).sum()) for x in (*gradients, *scales)]
        print(json.dumps({"items": items.tolist(), "state": state.tolist(), "zeroed": zeroed}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
