"""What drawing items is worth: ``python -m tests.sm100.work_model``. A model of the work list, not a measurement.

Items of a batch (two Q tiles of one head of one sequence) in the list's order, longest first; an item takes its key tiles and one more for
its start and end. A fixed stride gives item i to CTA i modulo their number; drawing gives the next item to the CTA that is free first, and
it asks up to four tiles before that (its loads run ahead so far). Printed: time of the last CTA over the least possible, as a table.
"""

import heapq

import torch

CTAS, HEADS, AHEAD = 148, 3, 4


def lengths(name: str, batch: int, generator: torch.Generator) -> torch.Tensor:
    """Keys of each sequence under one of five distributions."""
    normal, uniform = torch.randn(batch, generator=generator), torch.rand(batch, generator=generator)
    made = {
        "equal 4,096": torch.full((batch,), 4096.0),
        "uniform 600-14,980": 600 + uniform * 14380,
        "lognormal, median 2,000": (7.6 + normal).exp().clamp(1, 14980),
        "lognormal, median 150": (5.0 + 0.8 * normal).exp().clamp(1, 2000),
        "5% 14,980, others 600": torch.where(uniform < 0.05, 14980.0, 600.0),
    }
    return made[name].long()


NAMES = ("equal 4,096", "uniform 600-14,980", "lognormal, median 2,000", "lognormal, median 150", "5% 14,980, others 600")


def costs(keys: torch.Tensor) -> list[int]:
    """Tiles of time of each item, longest first."""
    return [int(x) + 1 for x in (-(-keys.sort(descending=True).values // 128)).clamp(min=1) for _ in range(HEADS)]


def strided(items: list[int]) -> float:
    """End of the last CTA, fixed stride."""
    return max(sum(items[i::CTAS]) for i in range(min(CTAS, len(items))))


def drawn(items: list[int], ahead: int = AHEAD) -> float:
    """End of the last CTA where each draws its next item ``ahead`` tiles before it is free."""
    asks, ends = [(0, i) for i in range(CTAS)], [0] * CTAS
    for cost in items:
        asked, cta = heapq.heappop(asks)
        ends[cta] = max(ends[cta], asked) + cost
        heapq.heappush(asks, (ends[cta] - min(ahead, cost), cta))
    return max(ends)


def ratios(name: str, batch: int, draws: int = 5) -> tuple[float, float]:
    """Fixed stride and drawn over the least possible, mean of some batches."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(draws):
        items = costs(lengths(name, batch, generator))
        least = max(sum(items) / CTAS, items[0])
        found.append((strided(items) / least, drawn(items) / least))
    return sum(a for a, _ in found) / draws, sum(b for _, b in found) / draws


def main() -> None:
    """Print the table."""
    print("| keys | samples | items a CTA | fixed stride | drawn |\n|---|---:|---:|---:|---:|")
    for name in NAMES:
        for batch in (64, 256, 1024):
            fixed, free = ratios(name, batch)
            print(f"| {name} | {batch:,} | {batch * HEADS / CTAS:.1f} | {fixed:.2f} | {free:.2f} |")


if __name__ == "__main__":
    main()
