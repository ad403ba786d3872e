"""Write what was measured into README.md and benchmarks/README.md, from the JSON files under ``benchmarks/results``.

    python tools/readme_figures.py          fill the places between the pages' marks and draw the pictures

A test holds that pages and pictures say what the files say.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import readme_gpu
import readme_pictures
import readme_ranks

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "pictures"
OF_PAGE = {
    "docs/ngram-memory.md": ("ngram_memory",),
    "docs/losses.md": ("softmax", "knowledge_graph"),
    "docs/idle-rows.md": ("idle_rows", "idle_quality"),
}
"""The sections that a page has in place of benchmarks/README.md."""
PLACES_PAGE = "docs/which-place.md"
GPU_PAGES = ("docs/gpu-status.md", "docs/gpu.md", "docs/index.md")
PAGES = ("README.md", "benchmarks/README.md", readme_ranks.PAGE, PLACES_PAGE, *GPU_PAGES, *OF_PAGE)
RANKS, RANK_COUNTS = RESULTS / "ranks-cpu.json", RESULTS / "rank_counts-cpu.json"
Figures = dict[str, Any]
Rows = Iterator[tuple[str, str, str, str]]
HEAD = ("| What | speedswap | Compared with | Ratio | Source |", "|---|---|---|---|---|")


def blocks(page: str) -> dict[str, str]:
    """Return the text between each pair of marks of a page, by the name in the marks."""
    if page == "README.md":
        return {"chosen": chosen(), "GPU status": readme_gpu.status(RESULTS)}
    if page in GPU_PAGES:
        return {"GPU runs": readme_gpu.ran(RESULTS)}
    if page == PLACES_PAGE:
        return {"places": places()}
    if page == readme_ranks.PAGE:
        return readme_ranks.blocks(*(_read(path.name)["results"] for path in (RANKS, RANK_COUNTS)))
    elsewhere = {name for names in OF_PAGE.values() for name in names}
    names = OF_PAGE.get(page, [name for name in SECTIONS if name not in elsewhere])
    sections = {name: section(name) for name in names if (RESULTS / f"{name}-cpu.json").exists()}
    return sections if page in OF_PAGE else {**sections, "GPU": readme_gpu.table(RESULTS)}


def section(name: str) -> str:
    """Return the table of one benchmark and a line on its machine."""
    source = f"{name}-cpu.json"
    lines = [cells(*row, source) for row in SECTIONS[name](_read(source)["results"])]
    return "\n".join([*HEAD, *lines, "", f"{machines([source])}; no GPU."])


def chosen() -> str:
    """Return README's six figures and a line on their machines."""
    names = ("step", "many_tables", "word2vec", "batching")
    step, many, word2vec, batching = (_read(f"{name}-cpu.json")["results"] for name in names)
    work, tables = step["workload"], many["workload"]
    adam = {name: entry.get("seconds") for name, entry in step["optimizers"]["adam"]["trainers"].items()}
    sgd = {name: entry["seconds"] for name, entry in many["ids"]["zipf"]["optimizers"]["sgd"]["trainers"].items()}
    sizes = next(entry for entry in step["sizes"] if entry["optimizer"] == "adam")
    (few, short), (most, long) = (
        (sizes["tables"][place]["rows"], sizes["tables"][place]["seconds"]) for place in (0, -1)
    )
    overlap = step["overlap"][1]["seconds"]
    both = overlap["compute"] + overlap["swap"]
    words, their_words = (
        statistics.median(run["words_per_second"] for run in word2vec[name]) for name in ("speedswap", "gensim")
    )
    last = batching["activations"]["points"][-1]
    split, whole = (last[name]["live_bytes"] / 2**20 for name in ("split", "whole"))
    table = [
        (
            f"Adam, training step, {work['lookups']:,} lookups in {work['rows']:,} × {work['dim']}",
            ms(adam["speedswap"]),
            f"torch SparseAdam: {ms(adam['torch SparseAdam'])}",
            f"{adam['torch SparseAdam'] / adam['speedswap']:.1f} ×",
        ),
        (
            f"SGD, training step, {tables['tables']} tables of {tables['rows']:,} × {tables['dim']}, "
            f"batch of {tables['batch']:,}",
            ms(sgd["speedswap"]),
            f"torch's `EmbeddingBag`s: {ms(sgd['torch SGD, sparse'])}",
            f"{sgd['torch SGD, sparse'] / sgd['speedswap']:.1f} ×",
        ),
        (
            f"{most / few:.0f} × the rows: the Adam step on {most:,} rows of {sizes['dim']}",
            ms(long),
            f"on {few:,} rows: {ms(short)}",
            f"{long / short:.1f} × the time",
        ),
        (
            f"step with `lookahead`, {ms(overlap['compute'])} of compute and {ms(overlap['swap'])} of swap",
            ms(overlap["lookahead"]),
            f"one after the other: {ms(both)}",
            f"{both / overlap['lookahead']:.1f} ×",
        ),
        (
            f"word2vec, {word2vec['speedswap'][0]['corpus_words']:,} words",
            f"{words:,.0f} words/s",
            f"gensim: {their_words:,.0f} words/s",
            f"{words / their_words:.1f} ×",
        ),
        (
            f"peak memory of a batch of {last['batch']:,} in micro-batches of "
            f"{batching['activations']['micro_batch_size']}",
            f"{split:.1f} MiB",
            f"unsplit: {whole:.1f} MiB",
            f"{whole / split:.0f} ×",
        ),
    ]
    on = machines([f"{name}-cpu.json" for name in names])
    head = ["| What | speedswap | Compared with | Ratio |", "|---|---|---|---|"]
    return "\n".join([*head, *(cells(*line) for line in table), "", f"{on}; no GPU."])


def places() -> str:
    """Return what each place costs, and a line on the machines."""
    names = ("step", "disk", "hot_rows", "ranks")
    step, disk, hot, ranks = (_read(f"{name}-cpu.json")["results"] for name in names)
    work, cached = step["workload"], disk["cached"]["seconds"]
    adam = {name: entry.get("seconds") for name, entry in step["optimizers"]["adam"]["trainers"].items()}
    size = f"a step with Adam, {work['lookups']:,} lookups in {work['rows']:,} × {work['dim']}"
    memory = f"{disk['limits']['memory'] / 2**20:.0f} MiB of memory"
    rows = f"{disk['workload']['rows']:,} rows of {disk['workload']['row_bytes']:,} B"
    rates = {kind: result["stores"]["speedswap"]["rows_per_second"] for kind, result in disk["ids"].items()}
    entry = next(iter(ranks["shapes"].values()))
    shape, alone = entry["shape"], entry["embedding alone"]
    together, apart = (alone[kind]["2"]["seconds"] for kind in ("ranks", "independent"))
    table = [
        ("ordinary memory", size, ms(adam["speedswap"]), f"torch SparseAdam: {ms(adam['torch SparseAdam'])}"),
        (
            "a disk, all rows in the cache",
            "the same step, in another run",
            ms(cached["disk"]),
            f"ordinary memory: {ms(cached['pageable'])}",
        ),
        (
            "a disk",
            f"steps with Zipf's ids, {rows}, {memory}",
            f"{rates['zipf']:,.0f} rows/s",
            f"uniform ids: {rates['uniform']:,.0f} rows/s",
        ),
        (
            "pinned, hot rows on the GPU",
            f"rows of a step that do not cross the bus, with {0.05:.0%} of the table there (counted, not timed)",
            f"{hot['caches']['0.05']['hits']:.0%}",
            f"with {0.01:.0%}: {hot['caches']['0.01']['hits']:.0%}",
        ),
        (
            "two processes of one job",
            f"a step of the embedding alone, {shape['lookups']:,} lookups a rank in {shape['rows']:,} × {shape['dim']}",
            ms(together),
            f"two that share nothing: {ms(apart)}",
        ),
    ]
    head = ["| Place | What | Measured | Compared with |", "|---|---|---|---|"]
    on = machines([f"{name}-cpu.json" for name in names])
    return "\n".join([*head, *(cells(*line) for line in table), "", f"{on}; no GPU."])


def machines(sources: list[str]) -> str:
    """Return what the files were measured on, with their names if the machines differ."""
    found: dict[str, list[str]] = {}
    for name in sources:
        machine = _read(name)["machine"]
        size = f"{machine['cores']} cores, {machine['memory_gib']:.0f} GiB"
        words = f"{machine['processor']}, {size}, torch {machine['torch']}"
        found.setdefault(words, []).append(name.removesuffix("-cpu.json"))
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{words} ({', '.join(names)})" for words, names in found.items())


def cells(*words: str) -> str:
    """Return a line of a table."""
    return "|" + "|".join(f" {each} " if each else " " for each in words) + "|"


def ms(seconds: float, digits: int = 1) -> str:
    return f"{1000 * seconds:.{digits}f} ms"


# ---------------------------------------------------------------------- each benchmark: what, ours, theirs, the ratio


def rows(found: Figures) -> Rows:
    """Compare gather and scatter, in both kinds of pages and over the widths."""
    pairs = (("gather_rows", "torch.index_select"), ("scatter_rows", "torch.index_copy_"))
    for pages, title in (("ordinary_pages", ""), ("huge_pages", ", huge pages")):
        point = found[pages]
        sizes = f"{point['rows']:,} random rows of {point['row_bytes']} B out of {point['table_rows']:,}{title}"
        for ours, peer in pairs:
            took = point["seconds"]
            ratio = point["times_faster"][ours][peer]
            yield f"`{ours}`, {sizes}", ms(took[ours], 2), f"`{peer}` {ms(took[peer], 2)}", f"{ratio:.2f}"
    sweep = found["sweep_of_ordinary_pages"]
    widths = [entry["row_bytes"] for entry in sweep]
    for ours, peer in pairs:
        ratios = [entry["times_faster"][ours][peer] for entry in sweep]
        what = f"`{ours}`, rows of {min(widths)} to {max(widths):,} B"
        yield what, "", f"`{peer}`", f"{min(ratios):.2f} to {max(ratios):.2f}"


def transfer(found: Figures) -> Rows:
    """Compare transfers to the device and back, each storage with its fastest peer."""
    point = found["table"]
    size = f"{point['batch_rows']:,} random rows of {point['row_bytes']} B"
    for storage, theirs in (("pageable", ("torch, pageable", "numpy, pageable")), ("disk", ("numpy, memmap",))):
        place = "table on disk" if storage == "disk" else f"{storage} table"
        for way in ("to_device", "from_device"):
            ours = point["stores"][f"speedswap, {storage}"][way]
            took, peer = min((point["stores"][name][way]["seconds"], name) for name in theirs)
            share = f"{ours['achieved_over_floor']:.0%} of a contiguous copy's speed"
            what = f"{place}, {size} {way.replace('_', ' the ')}: {share}"
            yield what, ms(ours["seconds"], 2), f"{peer} {ms(took, 2)}", f"{took / ours['seconds']:.2f}"


def step(found: Figures) -> Rows:
    """Compare training steps with each peer, over table sizes, and with lookahead."""
    work = found["workload"]
    size = f"{work['lookups']:,} lookups in {work['rows']:,} × {work['dim']}"
    for optimizer, result in found["optimizers"].items():
        seconds = {name: entry.get("seconds") for name, entry in result["trainers"].items()}
        ours = seconds["speedswap"]
        for peer in result["time_over"]["speedswap"]:
            theirs = seconds[peer]
            yield f"training step, {optimizer}, {size}", ms(ours), f"{peer} {ms(theirs)}", f"{theirs / ours:.2f}"
    for sizes in found["sizes"]:
        timed = [entry for entry in sizes["tables"] if "seconds" in entry]
        if len(timed) > 1:
            (few, short), (many, long) = ((timed[place]["rows"], timed[place]["seconds"]) for place in (0, -1))
            what = f"the step on {many:,} rows of {sizes['dim']}, {sizes['optimizer']}"
            yield what, ms(long), f"on {few:,} rows {ms(short)}", f"{short / long:.2f}"
    for entry in found["overlap"]:
        took = entry["seconds"]
        larger = max(took["compute"], took["swap"])
        what = f"step with lookahead; compute alone {ms(took['compute'])}, swap alone {ms(took['swap'])}"
        yield what, ms(took["lookahead"]), f"the larger of the two {ms(larger)}", f"{larger / took['lookahead']:.2f}"


def many_tables(found: Figures) -> Rows:
    """Compare steps over many tables with each peer, and over the number of tables."""
    work = found["workload"]
    size = f"{work['tables']} tables of {work['rows']:,} × {work['dim']}, batches of {work['batch']:,}"
    modules = {
        "FBGEMM": lambda name: "FBGEMM",
        "torch": lambda name: f"{work['tables']} × `nn.EmbeddingBag`, {name.removeprefix('torch ')}",
        "speedswap": lambda name: f"{work['tables']} × `EmbeddingBag`",
    }
    for ids, results in found["ids"].items():
        for optimizer, result in results["optimizers"].items():
            ours = result["trainers"]["speedswap"]["seconds"]
            for peer, entry in result["trainers"].items():
                if peer not in ("speedswap", "speedswap, fused"):
                    took, name = entry["seconds"], modules[entry["package"]](peer)
                    what = f"training step, {optimizer}, {size}, {ids} ids"
                    yield what, ms(ours), f"{name} {ms(took)}", f"{took / ours:.2f}"
    many = found["tables"]
    first, last = (many["numbers"][place] for place in (0, -1))
    what = f"{many['lookups']:,} lookups with {many['optimizer']} in {last['tables']:,} tables"
    ratio = first["seconds"] / last["seconds"]
    yield what, ms(last["seconds"]), f"in {first['tables']} table {ms(first['seconds'])}", f"{ratio:.2f}"


def id_map(found: Figures) -> Rows:
    """Compare the lookup of keys with each peer, and say the memory per key."""
    work, maps = found["workload"], found["maps"]
    keys = f"{work['keys']:,} Zipf keys, {work['distinct']:,} of them distinct, in batches of {work['batch']:,}"
    for goal in found["acceptance"]:
        if "peer" in goal:
            ours, peer = maps[goal["ours"]]["ns_per_key"], maps[goal["peer"]]["ns_per_key"]
            what = "`IdMap`" if maps[goal["ours"]]["job"] == "number" else f"`IdMap` of {work['rows']:,} rows, evicting"
            yield f"{what}, {keys}", f"{ours:.0f} ns per key", f"{goal['peer']} {peer:.0f} ns", f"{peer / ours:.1f}"
    memory = [f"{size:.1f} B ({name.removeprefix('speedswap, ')})" for name, size in found["bytes_per_key"].items()]
    yield "memory per key", ", ".join(memory).replace("speedswap", "no eviction"), "", ""


def pretrained(found: Figures) -> Rows:
    """Say how long the rows of a released model's table take to open, step, read, decode and save."""
    whole, peers, cold, float8, changed = (found[name] for name in ("published", "peers", "cold", "float8", "changed"))
    table, seconds = f"{whole['rows']:,} × {whole['dim']} in bfloat16", whole["seconds"]
    opened = f"{1000 * seconds['opened']:.0f} ms, {whole['peak_bytes_opened'] / 2**20:.0f} MiB of memory"
    yield f"open a table on disk over a file of {table}", opened, "", ""
    step = f"{whole['step_seconds']:.2f} s, {whole['anonymous_bytes'] / 2**20:,.0f} MiB of memory"
    yield f"step of {whole['lookups']:,} lookups with Adam", step, "", ""
    ours, ways = peers["candidates"]["speedswap"], {**peers["candidates"]}
    del ways["speedswap"]
    for what, key in (
        (f"open a file of {peers['rows']:,} × {peers['dim']}", "open_seconds"),
        (f"look {peers['lookups']:,} up, in the system's cache", "lookup_seconds"),
        ("step of those with lazy Adam", "step_seconds"),
    ):
        others = "; ".join(f"{name} {ms(entry[key], 0)}" for name, entry in ways.items() if key in entry)
        yield what, ms(ours[key], 0), others, ""
    memory = {name: f"{entry['anonymous_bytes'] / 2**20:,.0f} MiB" for name, entry in peers["candidates"].items()}
    others = "; ".join(f"{name} {memory[name]}" for name, entry in ways.items() if "step_seconds" in entry)
    yield f"memory after {peers['steps']} such steps", memory["speedswap"], others, ""
    rates = {name: statistics.median(each) for name, each in cold["rows_per_second"].items()}
    ours, what = rates["announced"], f"rows of {cold['dim']} bfloat16 in no cache, read in place"
    others = "; ".join(f"{name} {rates[name]:,.0f}" for name in ("page faults", "plain mmap"))
    yield what, f"{ours:,.0f} rows/s", others, f"{ours / max(rates['page faults'], rates['plain mmap']):.1f}"
    yield "the same, half of them in the log", f"{rates['log and base']:,.0f} rows/s", "", ""
    ours, torchs = (1000 * float8["seconds"][name] for name in ("base", "torch"))
    what = f"decode {float8['rows']:,} × {float8['dim']} float8 with scales"
    yield what, f"{ours:.1f} ms", f"torch {torchs:.1f} ms", f"{torchs / ours:.1f}"
    sizes, took = changed["bytes"], changed["seconds"]
    what = f"save the {changed['saved']:,} changed rows of {changed['rows']:,}"
    size = f"{sizes['rows'] / 2**20:.0f} MiB"
    yield what, f"{took['save_rows']:.2f} s, {size}", f"the whole table, {sizes['model'] / 2**20:.0f} MiB", ""
    yield "merge them into a copy of the checkpoint", f"{took['merge_rows']:.1f} s", "", ""


def disk(found: Figures) -> Rows:
    """Compare steps on disk with each store, in a cache and behind compute, and print the other goals."""
    work, cold, cached, pauses = (found[name] for name in ("workload", "cold", "cached", "pauses"))
    table = f"{work['rows']:,} rows of {work['row_bytes']:,} B"
    ours = cold["rows_per_second"]
    if "reads_per_second" in cold:
        reads = cold["reads_per_second"]
        what = f"random rows of a table on disk that is in no cache, {table}"
        yield what, f"{ours:,.0f} rows/s", f"random 4K reads by 64 threads {reads:,.0f}/s", f"{ours / reads:.2f}"
    memory = f"{found['limits']['memory'] / 2**20:.0f} MiB of memory"
    for kind, result in found["ids"].items():
        rate = result["stores"]["speedswap"]["rows_per_second"]
        for peer, ratio in result["times_faster"].items():
            what = f"steps with {kind} ids, {table}, {memory}"
            yield what, f"{rate:,.0f} rows/s", f"{peer} {rate / ratio:,.0f} rows/s", f"{ratio:.1f}"
    on_disk, in_memory = (cached["seconds"][name] for name in ("disk", "pageable"))
    what = (
        f"step with Adam, {cached['lookups']:,} lookups in {cached['rows']:,} × {cached['dim']}, all in the cache, a "
        f"commit every {cached['commit_seconds']:.0f} s"
    )
    yield what, ms(on_disk), f"pageable {ms(in_memory)}", f"{in_memory / on_disk:.2f}"
    for entry in found["overlap"]:
        took = entry["seconds"]
        larger = max(took["compute"], took["swap"])
        what = f"step on disk with lookahead; compute alone {ms(took['compute'], 0)}, swap alone {ms(took['swap'], 0)}"
        ratio = larger / took["lookahead"]
        yield what, ms(took["lookahead"], 0), f"the larger of the two {ms(larger, 0)}", f"{ratio:.2f}"
    ids, keyed = found["ids"], found["keyed"]
    keys = max(one["keys"] for one in keyed.values())
    commits = f"a commit every {found['turns']['pause_commits']:g} s"
    alone = {
        "bytes written over the rows' bytes": ", ".join(
            f"{result['written_over_rows']:.2f} ({kind} ids)" for kind, result in ids.items()
        ),
        "bytes on the disk over the rows' bytes": f"{found['disk_over_rows']:.2f}",
        f"99% of steps with {commits} are beyond the median by": ", ".join(
            f"{ms(pauses[kind]['p99'], 0)} ({kind} ids)" for kind in ids
        ),
        f"the same, with commits of an id map of {keys:,} keys": ", ".join(
            f"{ms(one['pause']['p99'], 0)} ({how})" for how, one in keyed.items()
        ),
        "opening after a kill, per 10 million rows": f"{found['kill']['seconds_per_10m_rows']:.2f} s",
        "memory compared with what cache, index, buffers and blocks are allowed": (
            f"{pauses['resident_bytes'] / 2**20:.0f} of {pauses['allowed_bytes'] / 2**20:.0f} MiB"
        ),
        "creation of 1,000,000,000 × 128 with Adam's state": f"{found['created_seconds']:.2f} s",
    }
    for what, reached in alone.items():
        yield what, reached, "", ""


def ranks(found: Figures) -> Rows:
    """Compare steps over ranks with as many independent processes and with TorchRec."""
    for entry in found["shapes"].values():
        shape = entry["shape"]
        sizes = f"{shape['lookups']:,} lookups a rank in {shape['rows']:,} × {shape['dim']}"
        for what, by_kind in entry.items():
            if not what.startswith(("embedding alone", "and ")):
                continue
            for ahead in ("", ", lookahead"):
                for number, timed in by_kind[f"ranks{ahead}"].items():
                    if number == "1":
                        continue
                    peers = {f"{number} independent processes": by_kind[f"independent{ahead}"][number]}
                    if "TorchRec" in by_kind and not ahead:
                        peers["TorchRec, row-wise"] = by_kind["TorchRec"][number]
                    took = timed["seconds"]
                    for name, peer in peers.items():
                        theirs = peer["seconds"]
                        title = f"{what}{ahead}, {number} ranks, {sizes}"
                        yield title, ms(took), f"{name} {ms(theirs)}", f"{theirs / took:.2f}"


def dlrm(found: Figures) -> Rows:
    """Compare samples per second with plain torch with each of its optimizers."""
    settings, rates = found["settings"], found["samples_per_second"]
    sizes = f"batches of {settings['batch']:,}, {settings['dim']} wide"
    what = f"`speedswap dlrm`, {settings['optimizer']}, with id maps, {sizes}"
    for name, ratio in found["ratios"].items():
        theirs = f"the model in plain torch, {name} {rates[name]:,} samples/s"
        yield what, f"{rates['speedswap']:,} samples/s", theirs, f"{ratio:.2f}"


def batching(found: Figures) -> Rows:
    """Say the cost, the savings and the exactness of splitting."""
    small = found["overhead"][0]
    extra = small["overhead_microseconds"]
    ours = extra["speedswap, auto"]
    what = (
        f"`BatchSplitter`, overhead per micro-batch over a manual loop ({small['micro_batches']} of a small "
        f"model; the limit is {small['limit_microseconds']} µs)"
    )
    for peer, took in extra.items():
        if not peer.startswith("speedswap"):
            yield what, f"{ours:.0f} µs", f"{peer} {took:,.0f} µs", f"{took / max(ours, 1):,.0f}"
    cost = dict(found["recovery"]["cost_seconds"])
    ours = cost.pop("speedswap")
    for peer, took in cost.items():
        yield "one out-of-memory error in a batch", ms(ours, 0), f"{peer} {ms(took, 0)}", f"{took / ours:.1f}"
    ends = [found["activations"]["points"][place] for place in (0, -1)]
    split, whole = ([end[how]["live_bytes"] / 2**20 for end in ends] for how in ("split", "whole"))
    what = (
        f"peak memory, batches of {ends[0]['batch']:,} and {ends[1]['batch']:,}, micro-batches of "
        f"{found['activations']['micro_batch_size']}"
    )
    mib, theirs = (f"{small:.1f} and {large:.1f} MiB" for small, large in (split, whole))
    yield what, mib, f"unsplit {theirs}", f"{whole[1] / split[1]:.0f}"
    pairs = found["contrastive"]
    error, took = pairs["relative_error"], pairs["seconds"]
    yield (
        f"gradient of a contrastive loss over {pairs['pairs']:,} pairs, relative error in float64 and float32",
        f"{error['backward_coupled, float64']:.0e} and {error['backward_coupled, float32']:.0e}",
        f"accumulated {error['plain accumulation, float64']:.0%}; unsplit float32 {error['whole batch, float32']:.0e}",
        "",
    )
    ratio = took["plain"] / took["coupled"]
    what = "its time, including the second pass"
    yield what, ms(took["coupled"], 0), f"accumulated {ms(took['plain'], 0)}", f"{ratio:.2f}"
    limits, many = found["limits"], found["limits"]["recoveries"]
    kept = many["over_time"][-1]["live_bytes"] - many["over_time"][0]["live_bytes"]
    reached = f"{ms(many['median_seconds'], 0)} per batch, {kept} bytes more alive at the end"
    yield f"{many['count']} out-of-memory errors in a row, one per batch", reached, "", ""
    beyond = limits["beyond"]
    what = f"a batch of {beyond['batch']:,} where {limits['fits']:,} fit, relative error of the gradient"
    yield what, f"{beyond['relative_error']:.0e}", "", ""
    # Files written by earlier versions have neither of the following.
    if "searches" in found:
        yield from _searches(found["searches"])
    if "rungs" in found:
        yield from _rungs(found["rungs"])


def _searches(found: Figures) -> Rows:
    """Compare the samples that are computed and discarded until a size is found that fits."""
    what = (
        f"samples computed and discarded until a size is found, {found['batches']} batches of {found['batch']:,} where "
        f"{found['fits']:,} fit"
    )
    ways = {
        name: f"{way['samples_lost']:,} (size {way['size']:,}{'' if way['trains'] else ', which then fails'})"
        for name, way in found["ways"].items()
    }
    ours = ways.pop("speedswap")
    for peer, theirs in ways.items():
        lost = found["ways"][peer]["samples_lost"], found["ways"]["speedswap"]["samples_lost"]
        yield what, ours, f"{peer} {theirs}", f"{lost[0] / lost[1]:.1f}"


def _rungs(found: Figures) -> Rows:
    """Say what each rung of escalation saves and costs."""
    without, *rungs = found["rungs"]
    shape = f"one sample of {found['length']:,} × {found['width']}, {found['layers']} layers"
    for rung in rungs:
        live, before = (f"{each['live_bytes'] / 2**20:.0f} MiB" for each in (rung, without))
        what = f"{shape}: peak memory and time on rung {rung['rung']} of escalation"
        yield what, f"{live}, {ms(rung['seconds'], 0)}", f"without: {before}, {ms(without['seconds'], 0)}", ""


def lengths(found: Figures) -> Rows:
    """Compare padding, and work lost to out-of-memory, for samples of different lengths."""
    shares = {
        name: f"{way['padding_share']:.0%} padding, {way['lost_share']:.0%} discarded"
        for name, way in found["ways"].items()
    }
    peer = "accelerate, find_executable_batch_size"
    compared = f"{peer}: {shares[peer]}" if peer in shares else ""
    for name, share in shares.items():
        if name != peer:
            what = (
                f"{name.removeprefix('speedswap, ')}: share of padding, and of tokens discarded after an out-of-memory"
            )
            yield f"{what}, {found['tokens']:,} tokens in {found['memory_bytes'] >> 20} MiB", share, compared, ""


def retry(found: Figures) -> Rows:
    """Compare the overhead of ``retry`` without an out-of-memory with toma's."""
    cost = found["no_work"]["overhead_seconds_a_chunk"]
    theirs = cost["toma: toma"]
    for name, key in {"retry.chunked": "speedswap.retry", "compat.toma": "speedswap.compat.toma: toma"}.items():
        ours = cost[key]
        what = f"`{name}`, overhead per chunk over a plain loop"
        yield what, f"{1e6 * ours:.1f} µs", f"toma {1e6 * theirs:,.0f} µs", f"{theirs / ours:,.0f}"


def word2vec(found: Figures) -> Rows:
    """Compare word2vec's speed and vectors with gensim's."""
    ours, peers = found["speedswap"], found["gensim"]
    speed, theirs = (statistics.median(run["words_per_second"] for run in runs) for runs in (ours, peers))
    epochs = f"{ours[0]['settings']['epochs']} epochs, medians of {len(ours)} seeds"
    what = f"word2vec, {ours[0]['corpus_words']:,} words, {epochs}"
    gensim = f"gensim, alpha {peers[0]['alpha']}: {theirs:,.0f} words/s"
    yield what, f"{speed:,.0f} words/s", gensim, f"{speed / theirs:.2f}"
    for i, pairs in enumerate(peers[0]["similarity"]):
        mean, their_mean = (
            f"{statistics.mean(run['similarity'][i]['spearman'] for run in runs):.3f}" for runs in (ours, peers)
        )
        what = f"its vectors on {pairs['name']}, Spearman, means of {len(ours)} seeds"
        yield what, mean, f"gensim {their_mean}", ""


def ncf(found: Figures) -> Rows:
    """Say NeuMF's ranking quality and its speed on large tables."""
    ours, dense, scale = found["speedswap_mean"], found["torch_dense_adam_mean"], found["scale"]
    yield (
        f"NeuMF on {found['ratings']}, best of the epochs, mean of {len(found['speedswap'])} seeds",
        f"HR@10 {ours['hr']:.3f}, NDCG@10 {ours['ndcg']:.3f}",
        f"torch, dense Adam: {dense['hr']:.3f}, {dense['ndcg']:.3f}",
        "",
    )
    what = (
        f"NeuMF, {scale['users']:,} users × {scale['items']:,} items × {scale['width']}, {scale['optimizer']}, "
        f"{scale['storage'].replace('memmap', 'disk')}, {scale['table_gib']:.1f} GiB of tables"
    )
    by_tenth = scale["steps_per_second_by_tenth"]
    speed = (
        f"{scale['steps_per_second']:.1f} steps/s of {scale['scores_a_step']:,} scores "
        f"({min(by_tenth):.1f} to {max(by_tenth):.1f} by tenth of the run)"
    )
    if "beside" in scale:  # whose memory is in the same process
        other = scale["beside"]
        theirs = f"{other['storage']} {other['steps_per_second']:.1f} steps/s"
        yield what, speed, theirs, f"{1 / other['step_over']:.2f}"
    else:
        yield what, f"{speed}, {scale['resident_gib']['most']:.1f} GiB peak resident memory", "", ""


def ngram_memory(found: Figures) -> Rows:
    """Compare a language model's perplexity and step with those of the model alone."""
    runs, size = found["quality"]["seeds"], found["quality"]["workload"]
    tokens = size["batch"] * size["length"] * size["steps"]
    both = [[run[name] for run in runs] for name in ("with", "without")]
    means = [statistics.mean(each) for each in both]
    memory, alone = (f"{mean:.1f} ({min(each):.1f} to {max(each):.1f})" for mean, each in zip(means, both, strict=True))
    what = f"perplexity after {tokens:,} tokens, {size['rows']:,} rows, mean of {len(runs)} seeds (range)"
    yield what, memory, f"the model alone {alone}", f"{means[1] / means[0]:.2f}"
    for step in found["steps"]:
        yield from _step_with_ngrams(step)


def _step_with_ngrams(step: Figures) -> Rows:
    """Compare a step with a memory in each place with that of the model alone."""
    work, seconds = step["workload"], step["seconds"]
    model = f"{work['layers']} layers of {work['dim']}, {step['tokens']:,} tokens"
    for place, took in seconds.items():
        over = took[place] / took["without"] - 1
        what = f"training step, {model}, {step['rows'][place]:,} rows of {work['row_dim']}, {place}: {over:+.1%}"
        yield (
            what,
            ms(took[place], 0),
            f"the model alone {ms(took['without'], 0)}",
            f"{took['without'] / took[place]:.2f}",
        )
    used, alone = ({name: step["processor_seconds"][name] for name in names} for names in (seconds, ["without"]))
    shares = ", ".join(f"{name} {took / alone['without'] - 1:+.1%}" for name, took in used.items())
    work_of_both = " and ".join(ms(took, 0) for took in used.values())
    yield f"processor time of that step: {shares}", work_of_both, f"the model alone {ms(alone['without'], 0)}", ""
    fresh = step["seconds_of_fresh_tables"]["disk"]
    what = f"its first steps on a fresh table on disk: {fresh['disk'] / fresh['without'] - 1:+.1%}"
    yield (
        what,
        ms(fresh["disk"], 0),
        f"the model alone {ms(fresh['without'], 0)}",
        f"{fresh['without'] / fresh['disk']:.2f}",
    )
    yield (
        f"rows of that step, {step['rows_per_step']:,.0f} of them, to the device and back",
        f"{(step['bytes_to_device'] + step['bytes_from_device']) / 2**20:.2f} MiB",
        f"its layers take {step['flops']['disk'] / 1e9:.0f} GFLOP",
        "",
    )


def softmax(found: Figures) -> Rows:
    """Compare softmax losses over all and over sampled rows with torch's over a matrix."""
    work, steps, losses = found["workload"], found["step_seconds"], found["loss_seconds"]
    size = f"{work['samples']:,} samples, {work['rows']:,} × {work['dim']}"
    for seconds, what in (
        (steps, f"training step with Adam, {size}"),
        (losses, f"loss and gradient of hidden, {size}"),
    ):
        (first, theirs), *ours = seconds.items()
        for name, took in ours:
            yield f"{what}: {name}", ms(took), f"{first}: {ms(theirs)}", f"{theirs / took:.1f}"


def host_time(found: Figures) -> Rows:
    """Compare the host's part of a step on a GPU with that of an earlier version."""
    work, then = found["workload"], found["against"]
    for name, what in (("plain", "a training step"), ("lookahead", "the same with lookahead")):
        ours, theirs = found[name], then[name]
        calls, before = (each["python"] + each["c"] for each in (ours, theirs))
        yield (
            f"calls of Python and C, {what}, {work['tables']} tables, fused Adam: {ours['launches']} launches, "
            f"{ours['waits']} wait",
            f"{calls:,}",
            f"commit {then['commit']}: {before:,}",
            f"{before / calls:.2f}",
        )
        took, before_took = ours["cpu_seconds"], theirs["cpu_seconds"]
        yield (
            f"processor time of {what}, the simulated GPU's included",
            ms(took, 2),
            f"commit {then['commit']}: {ms(before_took, 2)}",
            f"{before_took / took:.2f}",
        )


def idle_rows(found: Figures) -> Rows:
    """Compare steps that idle rows take later with lazy steps and with torch's dense ones."""
    size = f"{found['ids']:,} ids, {found['rows']:,} × {found['dim']}"
    for name, entry in found["optimizers"].items():
        lazy, dense, theirs = (entry["ms"][kind] / 1e3 for kind in ("lazy", "dense", "torch"))
        what = f'{name} with `idle_rows="dense"`, {size}; lazily {ms(lazy, 0)}'
        yield what, ms(dense, 0), f"`nn.Embedding`: {ms(theirs, 0)}", f"{theirs / dense:.1f}"
    if "averages" in found:
        took = {name: each / 1e3 for name, each in found["averages"].items()}
        without, ours, plain, theirs = took.values()
        yield (
            f"lazy Adam with an exponential average; without {ms(without, 0)}",
            ms(ours, 0),
            f"SparseAdam with AveragedModel {ms(theirs, 0)}; without {ms(plain, 0)}",
            f"{theirs / ours:.1f}",
        )


def idle_quality(found: Figures) -> Rows:
    """Compare models whose idle rows take every step with lazy ones."""
    names = {
        "word2vec": {"spearman": "word vectors, rank correlation with human judgement", "training_loss": "loss"},
        "ncf": {"hr@10": "NCF, HR@10", "ndcg@10": "NDCG@10"},
        "dlrm": {"auc": "DLRM on made-up clicks, AUC", "log_loss": "log loss"},
    }
    for application, figures in names.items():
        runs = found[application]["runs"]
        what = ", ".join(figures.values())
        lazy, dense = (
            ", ".join(f"{statistics.mean(run[each] for run in runs[way]):.4f}" for each in figures)
            for way in ("lazy", "dense")
        )
        first = next(iter(figures))
        better = sum(ours[first] > theirs[first] for ours, theirs in zip(runs["dense"], runs["lazy"], strict=True))
        yield f"{what}; better in {better} of {len(runs['lazy'])} seeds", dense, f"lazily {lazy}", ""


def knowledge_graph(found: Figures) -> Rows:
    """Compare ComplEx with PyKEEN's on small graphs."""
    for graph, models in found["mrr"].items():
        said = {
            name: f"{statistics.mean(each):.3f} ({min(each):.3f} to {max(each):.3f})" for name, each in models.items()
        }
        theirs = said.pop("PyKEEN")
        for name, ours in said.items():
            what = f"ComplEx on {graph}, filtered MRR, {found['epochs']} epochs, {len(models[name])} seeds: {name}"
            yield what, ours, f"PyKEEN, all entities: {theirs}", ""


SECTIONS: dict[str, Callable[[Figures], Rows]] = {
    each.__name__: each
    for each in (
        rows,
        transfer,
        step,
        many_tables,
        pretrained,
        id_map,
        disk,
        ranks,
        dlrm,
        batching,
        lengths,
        retry,
        word2vec,
        ncf,
        softmax,
        knowledge_graph,
        idle_rows,
        idle_quality,
        ngram_memory,
        host_time,
    )
}


def marks(name: str) -> tuple[str, str]:
    """Return the comments between which a page has one block."""
    return f"<!-- {name}: tools/readme_figures.py -->", f"<!-- end of {name} -->"


def between(text: str, begin: str, end: str, said: str) -> str:
    """Replace what is between two marks of a page."""
    found = re.search(f"{re.escape(begin)}.*?{re.escape(end)}", text, flags=re.DOTALL)
    if found is None:
        raise SystemExit(f"the page has no marks {begin} and {end}")
    return f"{text[: found.start()]}{begin}\n\n{said}\n\n{end}{text[found.end() :]}"


def filled(page: str) -> str:
    """Return a page with all its blocks as the files have them."""
    text = (ROOT / page).read_text()
    for name, said in blocks(page).items():
        text = between(text, *marks(name), said)
    return text


def drawn() -> dict[str, str]:
    """Return the text of each picture, by its file's name."""
    step, disk = (
        _read(f"{name}-cpu.json")["results"] if (RESULTS / f"{name}-cpu.json").exists() else None
        for name in ("step", "disk")
    )
    return readme_pictures.pictures(step, disk)


def _read(name: str) -> dict[str, Any]:
    text = (RESULTS / name).read_text()
    older, newer = '"speedswap, memmap"', '"speedswap, disk"'  # the storage's name when some were measured
    found: dict[str, Any] = json.loads(text.replace(older, newer))
    return found


def main() -> None:
    """Rewrite the pages and the pictures."""
    for page in PAGES:
        (ROOT / page).write_text(filled(page))
    PICTURES.mkdir(exist_ok=True)
    for name, text in drawn().items():
        (PICTURES / name).write_text(text)
    (ROOT / readme_ranks.PICTURE).write_text(readme_ranks.picture(_read(RANK_COUNTS.name)["results"]))


if __name__ == "__main__":
    main()
