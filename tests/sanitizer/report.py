"""What ``compute-sanitizer`` printed, as data: pairs of accesses, other reports, and whether each is explained (``pairs``)."""

import itertools
import json
import re
from typing import Any

from tests.sanitizer.cases import CASES, title
from tests.sanitizer.lanes import HARMLESS
from tests.sanitizer.pairs import STORED, explain, explain_read, function_of
from tests.sanitizer.probes import RACES

ACCESS = re.compile(r"(Read|Write) (?:Thread \([^)]*\)|access) at (\S+?)(?:_object_at\S*|\+0x[0-9a-f]+) in (\S+)")
ACCESS_ALONE = re.compile(r"at (\S+?)(?:_object_at\S*|\+0x[0-9a-f]+) in (\S+)")
TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck", "emulator")


def kernel_of(name: str) -> str:
    """``module Class`` of a kernel's entry name."""
    found = re.search(r"kernel_cutlass_kernel_(?:\w*?_)?(?:lp_fa4|fused_ops)(?:sm90|common)?([a-z_0-9]*)([A-Z]\w*?)(?:_object_at|$)", name)
    if not found:
        return "probe" if "Probe" in name else name[:80]
    module = found[1]
    for folder in ("rmsnorm_quantize", "gemm_quantize", "gemm_norm_backward", "norm_projection", "coordinates"):
        module = module.removeprefix(folder)
    return f"{module} {found[2]}"


def parse(text: str, tool: str) -> dict[str, Any]:
    """Summary lines; pairs of accesses, how often each was printed; other reports. Of the emulator, the number of its reports."""
    if tool == "emulator":
        found, lanes = re.search(r"^reports: (\d+)$", text, re.M), re.search(r"^lanes: (.*)$", text, re.M)
        seen: dict[tuple[str, str, str], int] = {}
        for name, access, arrival, n in json.loads(lanes[1]) if lanes else []:
            kernel = kernel_of(name)
            key = kernel, function_of(access, kernel), function_of(arrival, kernel)
            seen[key] = seen.get(key, 0) + n
        return {
            "summary": [] if found else text.splitlines()[-1:],
            "reports": int(found[1]) if found else None,
            "lanes": [{"kernel": k, "access": a, "arrival": b, "times": n} for (k, a, b), n in sorted(seen.items())],
        }
    lines = [line.removeprefix("=========").strip() for line in text.splitlines() if line.startswith("=========")]
    pairs: dict[tuple[str, str, str], int] = {}
    others: dict[tuple[str, str, str], int] = {}
    for i, line in enumerate(lines):
        if "hazard detected" in line or "Race reported" in line:
            follow = lines[i + 1 : i + 3] if "hazard" in line else list(itertools.takewhile(lambda x: x.startswith("and "), lines[i + 1 :]))
            seen = [m for x in [line, *follow] for m in [ACCESS.search(x)] if m]
            for other in seen[1:]:
                write, read = (seen[0], other) if seen[0][1] == "Write" else (other, seen[0])
                key = kernel_of(write[2]), write[3], read[3]
                pairs[key] = pairs.get(key, 0) + 1
            if len(seen) < 2:
                others[line[:200], "", ""] = others.get((line[:200], "", ""), 0) + 1
        elif re.match(r"Invalid|Uninitialized|Barrier error|Divergent|Leaked|Program hit|Out-of-range|Unused", line):
            at = ACCESS_ALONE.search(lines[i + 1]) if i + 1 < len(lines) else None
            key = (line, kernel_of(at[1]), at[2]) if at else (line, "", "")
            others[key] = others.get(key, 0) + 1
    return {
        "summary": [line for line in lines if "SUMMARY" in line],
        "pairs": [
            {"kernel": k, "write": w, "read": r, "functions": [function_of(w, k), function_of(r, k)], "printed": n}
            for (k, w, r), n in sorted(pairs.items())
        ],
        "others": [
            {"what": w, "kernel": k, "place": p, "function": function_of(p, k) if p else "", "printed": n}
            for (w, k, p), n in sorted(others.items())
        ],
    }


def evidence(record: dict[str, Any], probe: str) -> str:
    """What is missing in the record for a probe to explain a pair, or ``""``: racecheck reports the probe; the emulator's checker, which
    does report the same hand-over done wrong, does not."""
    found = {(r["tool"], r["case"].removeprefix("probe: ")): r for r in record["runs"] if r["case"].startswith("probe: ")}
    by_tool, emulated = found.get(("racecheck", probe)), found.get(("emulator", probe))
    if by_tool is None or by_tool["exit"] or not by_tool["pairs"]:
        return "racecheck says nothing of the probe"
    if emulated is None or emulated["reports"] != 0:
        return "the emulator has not found the probe clean"
    wrong = [r for (t, p), r in found.items() if t == "emulator" and p in RACES and p.split(", ")[0] == probe.split(", ")[0]]
    if not wrong or any(not r["reports"] for r in wrong):
        return "the emulator has not found the wrong form of the probe"
    return ""


def merge(records: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of several, later runs in place of earlier ones of the same tool and case (one of all its operations, or one of each);
    every run with its commit, every report with its reason if it has one."""
    runs: dict[tuple, dict[str, Any]] = {}
    for record in records:
        for run in record["runs"]:
            if isinstance(record.get("environment"), dict):
                run.setdefault("commit", record["environment"].get("commit"))
            runs[run["tool"], run["case"], run.get("operation")] = run
            apart = [(run["tool"], run["case"], title(operation)) for operation in CASES.get(run["case"], [])]
            whole = (run["tool"], run["case"], None)
            replaced = apart if "operation" not in run else [whole] if all(key in runs for key in apart) else []
            for key in replaced:
                runs.pop(key, None)
    out: dict[str, Any] = {"tool": next(r["tool"] for r in records if "tool" in r), "runs": list(runs.values())}
    clean = {r["case"] for r in out["runs"] if r["tool"] == "emulator" and r["reports"] == 0}
    for run in out["runs"]:
        run.pop("unexplained", None)
        if run["tool"] == "emulator":
            for lane in run.setdefault("lanes", []):
                reason = HARMLESS.get((lane["kernel"], lane["access"], lane["arrival"]))
                lane["explained"] = f"the arrival hands over {reason}" if reason else None
            open_lanes = sum(lane["explained"] is None for lane in run["lanes"])
            run["unexplained"] = 0 if run["case"].startswith("probe: ") else None if run["reports"] is None else run["reports"] + open_lanes
            continue
        blind = any(r["tool"] == "initcheck" and r["case"] == f"probe: {STORED}" and r["others"] for r in out["runs"])
        for report in run["others"]:
            report["explained"] = explain_read(report) if blind else None
        for report in run["pairs"]:
            probe = run["case"].startswith("probe: ")
            found = explain(report)
            missing = ""
            if found is not None and not probe:
                missing = evidence(out, found.probe)
                if not missing and run["case"] not in clean:
                    missing = "the emulator has not found the case clean"
            report["explained"] = found.reason if found is not None and not missing else None
            report["probe"] = found.probe if found is not None else None
            if missing:
                report["missing"] = missing
        said = [r for r in [*run["pairs"], *run["others"]] if r["explained"] is None]
        run["unexplained"] = 0 if run["case"].startswith("probe: ") else len(said) if run["summary"] else None
    made = [r["environment"] for r in records]  # a merged record has those of all of its runs
    used = {run.get("commit") for run in out["runs"]}
    out["environment"] = [one for e in made for one in (e if isinstance(e, list) else [e]) if None in used or one.get("commit") in used]
    return out


def commits(record: dict[str, Any]) -> str:
    """A line a tool: the commits of its runs and what each of them took."""
    lines = []
    for tool in TOOLS:
        seen: dict[str, list[str]] = {}
        for run in record["runs"]:
            if run["tool"] == tool:
                what = "probes" if run["case"].startswith("probe: ") else ": ".join(filter(None, [run["case"], run.get("operation")]))
                seen.setdefault(str(run.get("commit"))[:7], []).append(what)
        lines.append(f"{tool}: " + "; ".join(f"{commit} {', '.join(sorted(set(what)))}" for commit, what in seen.items()))
    return "\n".join(lines)


def table(record: dict[str, Any]) -> str:
    """Markdown by case: reports of each tool that are not explained, explained ones behind a plus; "-" where a run did not end or an
    operation is in none."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in record["runs"]:
        runs.setdefault((run["case"], run["tool"]), []).append(run)

    def cell(case: str, tool: str) -> str:
        found = runs.get((case, tool), [])
        operations = {r.get("operation") for r in found}
        missing = None not in operations and not operations >= {title(operation) for operation in CASES[case]}
        if missing or any(r["exit"] or r["unexplained"] is None for r in found):
            return "-"
        said = [p for r in found for p in [*r.get("pairs", []), *r.get("others", []), *r.get("lanes", [])]]
        known = {(p["kernel"], str(p.get("functions", p.get("place", p.get("access"))))) for p in said if p["explained"]}
        return str(sum(r["unexplained"] for r in found)) + (f" + {len(known)}" if known else "")

    lines = ["| case | " + " | ".join(TOOLS) + " | kernels |", "|---" * (len(TOOLS) + 2) + "|"]
    for case in CASES:
        kernels = {k for (c, t), rs in runs.items() if c == case and t != "emulator" for r in rs for k in r["kernels"] or []}
        lines.append(f"| {case} | " + " | ".join(cell(case, tool) for tool in TOOLS) + f" | {len(kernels)} |")
    return "\n".join(lines)
