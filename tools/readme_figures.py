"""README's tables of figures, made from the JSON files under ``benchmarks/results``.

    python tools/readme_figures.py          write them between README's marks

A test holds that README says what the files say.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import readme_gpu

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: tools/readme_figures.py -->", "<!-- end of figures -->"
GPU_BEGIN, GPU_END = "<!-- a GPU's figures: tools/readme_figures.py -->", "<!-- end of a GPU's figures -->"


def table() -> str:
    """The table, with a line below it that says what was measured on."""
    rows, word2vec = (_read(name) for name in ("rows-cpu.json", "word2vec-cpu.json"))
    lines = ["| What | speedswap | Beside it | Ratio | Source |", "|---|---|---|---|---|"]
    for pages, title in (("ordinary_pages", ""), ("huge_pages", ", huge pages")):
        found = rows["results"][pages]
        for ours, peer in (("gather_rows", "torch.index_select"), ("scatter_rows", "torch.index_copy_")):
            ms = {name: 1000 * found["seconds"][name] for name in (ours, peer)}
            lines.append(
                f"| `{ours}`, {found['rows']:,} random rows of {found['row_bytes']} B "
                f"out of {found['table_rows']:,}{title} "
                f"| {ms[ours]:.2f} ms | `{peer}` {ms[peer]:.2f} ms | {found['times_faster'][ours][peer]:.2f} "
                "| rows-cpu.json |"
            )
    sweep = rows["results"]["sweep_of_ordinary_pages"]
    for ours, peer in (("gather_rows", "torch.index_select"), ("scatter_rows", "torch.index_copy_")):
        ratios = [entry["times_faster"][ours][peer] for entry in sweep]
        widths = [entry["row_bytes"] for entry in sweep]
        lines.append(
            f"| `{ours}`, rows of {min(widths)} to {max(widths):,} B | | `{peer}` "
            f"| {min(ratios):.2f} to {max(ratios):.2f} | rows-cpu.json |"
        )
    sources = {
        "transfer-cpu.json": transfer_lines,
        "step-cpu.json": step_lines,
        "batching-cpu.json": batching_lines,
        "retry-cpu.json": retry_lines,
    }
    for name, lines_of in sources.items():
        if (RESULTS / name).exists():  # made on a quiet machine, some time after the benchmark
            lines += lines_of(_read(name)["results"], name)
    lines += _word2vec_lines(word2vec["results"])
    if (RESULTS / "ncf-cpu.json").exists():
        lines += _ncf_lines(_read("ncf-cpu.json")["results"])
    used = [
        name for name in ("rows-cpu.json", *sources, "word2vec-cpu.json", "ncf-cpu.json") if (RESULTS / name).exists()
    ]
    return "\n".join(
        [
            *lines,
            "",
            f"{machines(used)}; no GPU. Medians or whole runs, peers in the same run. The files are in "
            "[benchmarks/results](benchmarks/results).",
        ]
    )


def machines(sources: list[str]) -> str:
    """What the files were measured on, with their names where there are several machines."""
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
    """A table's rows to the device and back, each storage beside the fastest peer that has one like it."""
    point = found["table"]
    lines = []
    for storage, theirs in (("pageable", ("torch", "numpy")), ("memmap", ("numpy",))):
        for way in ("to_device", "from_device"):
            ours = point["stores"][f"speedswap, {storage}"][way]
            peers = {name: point["stores"][f"{name}, {storage}"][way]["seconds"] for name in theirs}
            peer = min(peers, key=peers.__getitem__)
            lines.append(
                f"| {storage} table, {point['batch_rows']:,} random rows of {point['row_bytes']} B "
                f"{way.replace('_', ' the ')}: {ours['achieved_over_floor']:.0%} of a contiguous copy's speed "
                f"| {1000 * ours['seconds']:.2f} ms | {peer} {1000 * peers[peer]:.2f} ms "
                f"| {peers[peer] / ours['seconds']:.2f} | {source} |"
            )
    return lines


def step_lines(found: dict[str, Any], source: str) -> list[str]:
    """Training steps beside each peer, over the size of the table, and with lookahead."""
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


def retry_lines(found: dict[str, Any], source: str) -> list[str]:
    """What it costs to be ready for an out-of-memory that does not come, beside toma."""
    cost = found["no_work"]["overhead_seconds_a_chunk"]
    pairs = {"`retry.chunked`": "speedswap.retry", "`compat.toma`": "speedswap.compat.toma: toma"}
    theirs = cost["toma: toma"]
    return [
        f"| {name}, a chunk, over a native loop | {1e6 * cost[ours]:.1f} µs | toma {1e6 * theirs:,.0f} µs "
        f"| {theirs / cost[ours]:,.0f} | {source} |"
        for name, ours in pairs.items()
    ]


def batching_lines(found: dict[str, Any], source: str) -> list[str]:
    """What splitting costs, what it saves, and what it gets right."""
    small = found["overhead"][0]
    extra, ours = small["overhead_microseconds"], "speedswap, auto"
    lines = []
    for peer, took in extra.items():
        if not peer.startswith("speedswap"):
            lines.append(
                f"| `BatchSplitter`, over a loop by hand, a micro-batch ({small['micro_batches']} of a small model; "
                f"the limit is {small['limit_microseconds']} µs) | {extra[ours]:.0f} µs | {peer} {took:,.0f} µs "
                f"| {took / max(extra[ours], 1):,.0f} | {source} |"
            )
    cost = found["recovery"]["cost_seconds"]
    for peer, seconds in cost.items():
        if peer != "speedswap":
            lines.append(
                f"| one out-of-memory in a batch | {1000 * cost['speedswap']:.0f} ms | {peer} {1000 * seconds:.0f} ms "
                f"| {seconds / cost['speedswap']:.1f} | {source} |"
            )
    first, last = (found["activations"]["points"][place] for place in (0, -1))
    split, whole = (
        {end["batch"]: end[how]["live_bytes"] / 2**20 for end in (first, last)} for how in ("split", "whole")
    )
    lines.append(
        f"| memory at the most, batches of {first['batch']:,} and {last['batch']:,}, micro-batches of "
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
        f"| and its time, second pass included | {ms['coupled']:.0f} ms | accumulated {ms['plain']:.0f} ms "
        f"| {ms['plain'] / ms['coupled']:.2f} | {source} |"
    )
    limits, many = found["limits"], found["limits"]["recoveries"]
    kept = many["over_time"][-1]["live_bytes"] - many["over_time"][0]["live_bytes"]
    lines.append(
        f"| {many['count']} out-of-memory errors in a row, one a batch "
        f"| {1000 * many['median_seconds']:.0f} ms a batch, {kept} bytes more alive at the end "
        f"| | | {source} |"
    )
    lines.append(
        f"| a batch of {limits['beyond']['batch']:,} where {limits['fits']:,} fit, error of the gradient "
        f"| {limits['beyond']['relative_error']:.0e} | | | {source} |"
    )
    return lines


def _word2vec_lines(found: dict[str, Any]) -> list[str]:
    ours, peers = found["speedswap"], found["gensim"]
    speed, peer_speed = (statistics.median(run["words_per_second"] for run in runs) for runs in (ours, peers))
    lines = [
        f"| word2vec, {ours[0]['corpus_words']:,} words, {ours[0]['settings']['epochs']} epochs, "
        f"medians of {len(ours)} seeds "
        f"| {speed:,.0f} words/s | gensim, alpha {peers[0]['alpha']}: {peer_speed:,.0f} words/s "
        f"| {speed / peer_speed:.2f} | word2vec-cpu.json |"
    ]
    for i, pairs in enumerate(peers[0]["similarity"]):
        mean, peer_mean = (statistics.mean(run["similarity"][i]["spearman"] for run in runs) for runs in (ours, peers))
        lines.append(
            f"| its vectors on {pairs['name']}, Spearman, means of {len(ours)} seeds | {mean:.3f} "
            f"| gensim {peer_mean:.3f} | | word2vec-cpu.json |"
        )
    return lines


def _ncf_lines(found: dict[str, Any]) -> list[str]:
    ours, dense, scale = found["speedswap_mean"], found["torch_dense_adam_mean"], found["scale"]
    by_tenth = scale["steps_per_second_by_tenth"]
    return [
        f"| NeuMF on {found['ratings']}, best of the epochs, mean of {len(found['speedswap'])} seeds "
        f"| HR@10 {ours['hr']:.3f}, NDCG@10 {ours['ndcg']:.3f} "
        f"| torch, dense Adam: {dense['hr']:.3f}, {dense['ndcg']:.3f} | | ncf-cpu.json |",
        f"| NeuMF, {scale['users']:,} users × {scale['items']:,} items × {scale['width']}, {scale['optimizer']}, "
        f"{scale['storage']}, {scale['table_gib']:.1f} GiB of tables "
        f"| {scale['steps_per_second']:.1f} steps/s of {scale['scores_a_step']:,} scores "
        f"({min(by_tenth):.1f} to {max(by_tenth):.1f} over the run's tenths), {scale['resident_gib']['most']:.1f} GiB "
        "resident at most | | | ncf-cpu.json |",
    ]


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text()
    for begin, end, said in ((BEGIN, END, table()), (GPU_BEGIN, GPU_END, readme_gpu.table(RESULTS))):
        text = between(text, begin, end, said)
    readme.write_text(text)


def between(text: str, begin: str, end: str, said: str) -> str:
    """The text with something else between two marks."""
    found = re.search(f"{re.escape(begin)}.*?{re.escape(end)}", text, flags=re.DOTALL)
    if found is None:
        raise SystemExit(f"README has no marks {begin} and {end}")
    return f"{text[: found.start()]}{begin}\n\n{said}\n\n{end}{text[found.end() :]}"


if __name__ == "__main__":
    main()
