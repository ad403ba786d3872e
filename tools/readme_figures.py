"""Write what was measured into README.md and benchmarks/README.md, from the JSON files under ``benchmarks/results``.

    python tools/readme_figures.py          fill the places between the pages' marks and draw the pictures

A test holds that pages and pictures say what the files say.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import readme_disk
import readme_gpu
import readme_pictures
import readme_ranks

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "pictures"
PAGES = ("README.md", "benchmarks/README.md", readme_ranks.PAGE)
RANKS = RESULTS / "ranks-cpu.json"
HEAD = ("| What | speedswap | Compared with | Ratio | Source |", "|---|---|---|---|---|")


def blocks(page: str) -> dict[str, str]:
    """Return the text between each pair of marks of a page, by the name in the marks."""
    if page == "README.md":
        return {"chosen": chosen(), "GPU status": readme_gpu.status(RESULTS)}
    if page == readme_ranks.PAGE:
        return readme_ranks.blocks(_read("ranks-cpu.json")["results"]) if RANKS.exists() else {}
    sections = {name: section(name) for name in SECTIONS if (RESULTS / f"{name}-cpu.json").exists()}
    return {**sections, "GPU": readme_gpu.table(RESULTS)}


def section(name: str) -> str:
    """Return the table of one benchmark and a line on its machine."""
    source = f"{name}-cpu.json"
    lines = SECTIONS[name](_read(source)["results"], source)
    return "\n".join([*HEAD, *lines, "", f"{machines([source])}; no GPU."])


def chosen() -> str:
    """Return README's six figures and a line on their machines."""
    names = ("step", "many_tables", "word2vec", "batching")
    step, many, word2vec, batching = (_read(f"{name}-cpu.json")["results"] for name in names)
    trainers = {
        kind: {name: entry.get("seconds") for name, entry in found["trainers"].items()}
        for kind, found in step["optimizers"].items()
    }
    work = step["workload"]
    what = f"training step, {work['lookups']:,} lookups in {work['rows']:,} × {work['dim']}"
    lines = []
    tables = many["workload"]
    merged = many["ids"]["zipf"]["optimizers"]["sgd"]["trainers"]
    for title, times, peer, whose in (
        (f"Adam, {what}", trainers["adam"], "torch SparseAdam", "torch SparseAdam"),
        (
            f"SGD, training step, {tables['tables']} tables of {tables['rows']:,} × {tables['dim']}, "
            f"batch of {tables['batch']:,}",
            {name: entry["seconds"] for name, entry in merged.items()},
            "torch SGD, sparse",
            "torch's `EmbeddingBag`s",
        ),
    ):
        ours, theirs = times["speedswap"], times[peer]
        lines.append(f"| {title} | {1000 * ours:.1f} ms | {whose}: {1000 * theirs:.1f} ms | {theirs / ours:.1f} × |")
    sizes = next(entry for entry in step["sizes"] if entry["optimizer"] == "adam")
    small, large = (sizes["tables"][place] for place in (0, -1))
    lines.append(
        f"| {large['rows'] / small['rows']:.0f} × the rows: the Adam step on {large['rows']:,} rows of {sizes['dim']} "
        f"| {1000 * large['seconds']:.1f} ms | on {small['rows']:,} rows: {1000 * small['seconds']:.1f} ms "
        f"| {large['seconds'] / small['seconds']:.1f} × the time |"
    )
    overlap = step["overlap"][1]["seconds"]
    ms = {name: 1000 * seconds for name, seconds in overlap.items()}
    lines.append(
        f"| step with `lookahead`, {ms['compute']:.1f} ms of compute and {ms['swap']:.1f} ms of swap "
        f"| {ms['lookahead']:.1f} ms | one after the other: {ms['compute'] + ms['swap']:.1f} ms "
        f"| {(ms['compute'] + ms['swap']) / ms['lookahead']:.1f} × |"
    )
    ours, theirs = (
        statistics.median(run["words_per_second"] for run in word2vec[name]) for name in ("speedswap", "gensim")
    )
    lines.append(
        f"| word2vec, {word2vec['speedswap'][0]['corpus_words']:,} words | {ours:,.0f} words/s "
        f"| gensim: {theirs:,.0f} words/s | {ours / theirs:.1f} × |"
    )
    last = batching["activations"]["points"][-1]
    split, whole = (last[name]["live_bytes"] / 2**20 for name in ("split", "whole"))
    lines.append(
        f"| peak memory of a batch of {last['batch']:,} in micro-batches of "
        f"{batching['activations']['micro_batch_size']} "
        f"| {split:.1f} MiB | unsplit: {whole:.1f} MiB | {whole / split:.0f} × |"
    )
    sources = [f"{name}-cpu.json" for name in names]
    return "\n".join(
        [
            "| What | speedswap | Compared with | Ratio |",
            "|---|---|---|---|",
            *lines,
            "",
            f"{machines(sources)}; no GPU.",
        ]
    )


def rows_lines(found: dict[str, Any], source: str) -> list[str]:
    """Return the rows of the table for gather and scatter, in both kinds of pages and over the widths."""
    pairs = (("gather_rows", "torch.index_select"), ("scatter_rows", "torch.index_copy_"))
    lines = []
    for pages, title in (("ordinary_pages", ""), ("huge_pages", ", huge pages")):
        point = found[pages]
        for ours, peer in pairs:
            ms = {name: 1000 * point["seconds"][name] for name in (ours, peer)}
            lines.append(
                f"| `{ours}`, {point['rows']:,} random rows of {point['row_bytes']} B "
                f"out of {point['table_rows']:,}{title} "
                f"| {ms[ours]:.2f} ms | `{peer}` {ms[peer]:.2f} ms | {point['times_faster'][ours][peer]:.2f} "
                f"| {source} |"
            )
    sweep = found["sweep_of_ordinary_pages"]
    for ours, peer in pairs:
        ratios = [entry["times_faster"][ours][peer] for entry in sweep]
        widths = [entry["row_bytes"] for entry in sweep]
        lines.append(
            f"| `{ours}`, rows of {min(widths)} to {max(widths):,} B | | `{peer}` "
            f"| {min(ratios):.2f} to {max(ratios):.2f} | {source} |"
        )
    return lines


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


def transfer_lines(found: dict[str, Any], source: str) -> list[str]:
    """Return the rows for transfers to the device and back, each storage beside its fastest peer."""
    point = found["table"]
    lines = []
    for storage, theirs in (("pageable", ("torch, pageable", "numpy, pageable")), ("disk", ("numpy, memmap",))):
        for way in ("to_device", "from_device"):
            ours = point["stores"][f"speedswap, {storage}"][way]
            peers = {name: point["stores"][name][way]["seconds"] for name in theirs}
            peer = min(peers, key=peers.__getitem__)
            place = "table on disk" if storage == "disk" else f"{storage} table"
            lines.append(
                f"| {place}, {point['batch_rows']:,} random rows of {point['row_bytes']} B "
                f"{way.replace('_', ' the ')}: {ours['achieved_over_floor']:.0%} of a contiguous copy's speed "
                f"| {1000 * ours['seconds']:.2f} ms | {peer} {1000 * peers[peer]:.2f} ms "
                f"| {peers[peer] / ours['seconds']:.2f} | {source} |"
            )
    return lines


def step_lines(found: dict[str, Any], source: str) -> list[str]:
    """Return the rows for training steps beside each peer, over table sizes, and with lookahead."""
    work = found["workload"]
    lines = []
    for optimizer, result in found["optimizers"].items():
        seconds = {name: entry.get("seconds") for name, entry in result["trainers"].items()}
        ours = seconds["speedswap"]
        for peer in result["time_over"]["speedswap"]:
            lines.append(
                f"| training step, {optimizer}, {work['lookups']:,} lookups in {work['rows']:,} × {work['dim']} "
                f"| {1000 * ours:.1f} ms | {peer} {1000 * seconds[peer]:.1f} ms | {seconds[peer] / ours:.2f} "
                f"| {source} |"
            )
    for sizes in found["sizes"]:
        timed = [entry for entry in sizes["tables"] if "seconds" in entry]
        if len(timed) > 1:
            lines.append(
                f"| the step on {timed[-1]['rows']:,} rows of {sizes['dim']}, {sizes['optimizer']} "
                f"| {1000 * timed[-1]['seconds']:.1f} ms "
                f"| on {timed[0]['rows']:,} rows {1000 * timed[0]['seconds']:.1f} ms "
                f"| {timed[0]['seconds'] / timed[-1]['seconds']:.2f} | {source} |"
            )
    for entry in found["overlap"]:
        took = {name: 1000 * seconds for name, seconds in entry["seconds"].items()}
        larger = max(took["compute"], took["swap"])
        lines.append(
            f"| step with lookahead; compute alone {took['compute']:.1f} ms, swap alone {took['swap']:.1f} ms "
            f"| {took['lookahead']:.1f} ms | the larger of the two {larger:.1f} ms "
            f"| {larger / took['lookahead']:.2f} | {source} |"
        )
    return lines


def many_tables_lines(found: dict[str, Any], source: str) -> list[str]:
    """Return the rows for steps over many tables beside each peer, and over the number of tables."""
    work = found["workload"]
    lines = []
    for ids, results in found["ids"].items():
        for optimizer, result in results["optimizers"].items():
            ms = {name: 1000 * entry["seconds"] for name, entry in result["trainers"].items()}
            for peer, entry in result["trainers"].items():
                if peer not in ("speedswap", "speedswap, fused"):
                    lines.append(
                        f"| training step, {optimizer}, {work['tables']} tables of {work['rows']:,} × {work['dim']}, "
                        f"batches of {work['batch']:,}, {ids} ids | {ms['speedswap']:.1f} ms "
                        f"| {_each(work['tables'], peer, entry['package'])} {ms[peer]:.1f} ms "
                        f"| {ms[peer] / ms['speedswap']:.2f} | {source} |"
                    )
    many = found["tables"]
    first, last = (many["numbers"][place] for place in (0, -1))
    lines.append(
        f"| {many['lookups']:,} lookups with {many['optimizer']} in {last['tables']:,} tables "
        f"| {1000 * last['seconds']:.1f} ms | in {first['tables']} table {1000 * first['seconds']:.1f} ms "
        f"| {first['seconds'] / last['seconds']:.2f} | {source} |"
    )
    return lines


def id_map_lines(found: dict[str, Any], source: str) -> list[str]:
    """Return the rows for keys to rows beside each peer, and for the memory per key."""
    work, maps = found["workload"], found["maps"]
    keys = f"{work['keys']:,} Zipf keys, {work['distinct']:,} of them distinct, in batches of {work['batch']:,}"
    lines = []
    for goal in found["acceptance"]:
        if "peer" in goal:
            ours, peer = maps[goal["ours"]]["ns_per_key"], maps[goal["peer"]]["ns_per_key"]
            what = "`IdMap`" if maps[goal["ours"]]["job"] == "number" else f"`IdMap` of {work['rows']:,} rows, evicting"
            lines.append(
                f"| {what}, {keys} | {ours:.0f} ns per key | {goal['peer']} {peer:.0f} ns "
                f"| {peer / ours:.1f} | {source} |"
            )
    memory = [f"{size:.1f} B ({name.removeprefix('speedswap, ')})" for name, size in found["bytes_per_key"].items()]
    lines.append(f"| memory per key | {', '.join(memory).replace('speedswap', 'no eviction')} | | | {source} |")
    return lines


def dlrm_lines(found: dict[str, Any], source: str) -> list[str]:
    """Return the rows for samples per second beside plain torch with each of its optimizers."""
    settings, rates = found["settings"], found["samples_per_second"]
    sizes = f"batches of {settings['batch']:,}, {settings['dim']} wide"
    what = f"`speedswap dlrm`, {settings['optimizer']}, with id maps, {sizes}"
    return [
        f"| {what} | {rates['speedswap']:,} samples/s | the model in plain torch, {name} {rates[name]:,} samples/s "
        f"| {ratio:.2f} | {source} |"
        for name, ratio in found["ratios"].items()
    ]


def _each(tables: int, trainer: str, package: str) -> str:
    """Return a trainer's name as the figures have it, with the number of modules where there are several."""
    if package == "FBGEMM":
        return "FBGEMM"
    if package == "torch":
        return f"{tables} × `nn.EmbeddingBag`, {trainer.removeprefix('torch ')}"
    return f"{tables} × `EmbeddingBag`"


def retry_lines(found: dict[str, Any], source: str) -> list[str]:
    """Return the rows for the overhead of ``retry`` without an out-of-memory, beside toma."""
    cost = found["no_work"]["overhead_seconds_a_chunk"]
    pairs = {"`retry.chunked`": "speedswap.retry", "`compat.toma`": "speedswap.compat.toma: toma"}
    theirs = cost["toma: toma"]
    return [
        f"| {name}, overhead per chunk over a plain loop | {1e6 * cost[ours]:.1f} µs | toma {1e6 * theirs:,.0f} µs "
        f"| {theirs / cost[ours]:,.0f} | {source} |"
        for name, ours in pairs.items()
    ]


def batching_lines(found: dict[str, Any], source: str) -> list[str]:
    """Return the rows for the cost, the savings and the exactness of splitting."""
    small = found["overhead"][0]
    extra, ours = small["overhead_microseconds"], "speedswap, auto"
    lines = []
    for peer, took in extra.items():
        if not peer.startswith("speedswap"):
            lines.append(
                f"| `BatchSplitter`, overhead per micro-batch over a manual loop ({small['micro_batches']} of a small "
                f"model; the limit is {small['limit_microseconds']} µs) | {extra[ours]:.0f} µs | {peer} {took:,.0f} µs "
                f"| {took / max(extra[ours], 1):,.0f} | {source} |"
            )
    cost = found["recovery"]["cost_seconds"]
    for peer, seconds in cost.items():
        if peer != "speedswap":
            lines.append(
                f"| one out-of-memory error in a batch | {1000 * cost['speedswap']:.0f} ms "
                f"| {peer} {1000 * seconds:.0f} ms "
                f"| {seconds / cost['speedswap']:.1f} | {source} |"
            )
    first, last = (found["activations"]["points"][place] for place in (0, -1))
    split, whole = (
        {end["batch"]: end[how]["live_bytes"] / 2**20 for end in (first, last)} for how in ("split", "whole")
    )
    lines.append(
        f"| peak memory, batches of {first['batch']:,} and {last['batch']:,}, micro-batches of "
        f"{found['activations']['micro_batch_size']} | {split[first['batch']]:.1f} and {split[last['batch']]:.1f} MiB "
        f"| unsplit {whole[first['batch']]:.1f} and {whole[last['batch']]:.1f} MiB "
        f"| {whole[last['batch']] / split[last['batch']]:.0f} | {source} |"
    )
    pairs = found["contrastive"]
    error = pairs["relative_error"]
    lines.append(
        f"| gradient of a contrastive loss over {pairs['pairs']:,} pairs, relative error in float64 and float32 "
        f"| {error['backward_coupled, float64']:.0e} and {error['backward_coupled, float32']:.0e} "
        f"| accumulated {error['plain accumulation, float64']:.0%}; unsplit float32 "
        f"{error['whole batch, float32']:.0e} | | {source} |"
    )
    ms = {name: 1000 * seconds for name, seconds in pairs["seconds"].items()}
    lines.append(
        f"| its time, including the second pass | {ms['coupled']:.0f} ms | accumulated {ms['plain']:.0f} ms "
        f"| {ms['plain'] / ms['coupled']:.2f} | {source} |"
    )
    limits, many = found["limits"], found["limits"]["recoveries"]
    kept = many["over_time"][-1]["live_bytes"] - many["over_time"][0]["live_bytes"]
    lines.append(
        f"| {many['count']} out-of-memory errors in a row, one per batch "
        f"| {1000 * many['median_seconds']:.0f} ms per batch, {kept} bytes more alive at the end "
        f"| | | {source} |"
    )
    lines.append(
        f"| a batch of {limits['beyond']['batch']:,} where {limits['fits']:,} fit, relative error of the gradient "
        f"| {limits['beyond']['relative_error']:.0e} | | | {source} |"
    )
    return lines


def word2vec_lines(found: dict[str, Any], source: str) -> list[str]:
    """Return the rows for word2vec's speed and vectors beside gensim's."""
    ours, peers = found["speedswap"], found["gensim"]
    speed, peer_speed = (statistics.median(run["words_per_second"] for run in runs) for runs in (ours, peers))
    lines = [
        f"| word2vec, {ours[0]['corpus_words']:,} words, {ours[0]['settings']['epochs']} epochs, "
        f"medians of {len(ours)} seeds "
        f"| {speed:,.0f} words/s | gensim, alpha {peers[0]['alpha']}: {peer_speed:,.0f} words/s "
        f"| {speed / peer_speed:.2f} | {source} |"
    ]
    for i, pairs in enumerate(peers[0]["similarity"]):
        mean, peer_mean = (statistics.mean(run["similarity"][i]["spearman"] for run in runs) for runs in (ours, peers))
        lines.append(
            f"| its vectors on {pairs['name']}, Spearman, means of {len(ours)} seeds | {mean:.3f} "
            f"| gensim {peer_mean:.3f} | | {source} |"
        )
    return lines


def ncf_lines(found: dict[str, Any], source: str) -> list[str]:
    """Return the rows for NeuMF's ranking quality and its speed on large tables."""
    ours, dense, scale = found["speedswap_mean"], found["torch_dense_adam_mean"], found["scale"]
    by_tenth = scale["steps_per_second_by_tenth"]
    memory, beside = f", {scale['resident_gib']['most']:.1f} GiB peak resident memory", "|"
    if "beside" in scale:  # whose memory is in the same process
        other = scale["beside"]
        memory, beside = (
            "",
            f"{other['storage']} {other['steps_per_second']:.1f} steps/s | {1 / other['step_over']:.2f}",
        )
    return [
        f"| NeuMF on {found['ratings']}, best of the epochs, mean of {len(found['speedswap'])} seeds "
        f"| HR@10 {ours['hr']:.3f}, NDCG@10 {ours['ndcg']:.3f} "
        f"| torch, dense Adam: {dense['hr']:.3f}, {dense['ndcg']:.3f} | | {source} |",
        f"| NeuMF, {scale['users']:,} users × {scale['items']:,} items × {scale['width']}, {scale['optimizer']}, "
        f"{scale['storage'].replace('memmap', 'disk')}, {scale['table_gib']:.1f} GiB of tables "
        f"| {scale['steps_per_second']:.1f} steps/s of {scale['scores_a_step']:,} scores "
        f"({min(by_tenth):.1f} to {max(by_tenth):.1f} by tenth of the run){memory} | {beside} | {source} |",
    ]


SECTIONS = {
    "rows": rows_lines,
    "transfer": transfer_lines,
    "step": step_lines,
    "many_tables": many_tables_lines,
    "id_map": id_map_lines,
    "disk": readme_disk.lines,
    "ranks": readme_ranks.lines,
    "dlrm": dlrm_lines,
    "batching": batching_lines,
    "retry": retry_lines,
    "word2vec": word2vec_lines,
    "ncf": ncf_lines,
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
    if RANKS.exists():
        (ROOT / readme_ranks.PICTURE).write_text(readme_ranks.picture(_read(RANKS.name)["results"]))


if __name__ == "__main__":
    main()
