"""Results as text, Markdown, JSON and a plot. A result is the dictionary that `run.py` fills."""

import json

from benchmarks.timing import geometric_mean, summarize


def median(arm):
    """Median seconds per call of one arm's record, or None when it has no samples."""
    return summarize(arm["samples"]).median if arm.get("samples") else None


def ratios(result, other):
    """Our speed over another arm's for every row that has both: {row name: ratio}."""
    found = {}
    for row in result["rows"]:
        ours, theirs = (median(row["arms"].get(name, {})) for name in ("ours", other))
        if ours and theirs:
            found[row["name"]] = theirs / ours
    return found


def others(result):
    """Arms besides ours that were timed in at least one row, in order of first appearance."""
    names = dict.fromkeys(name for row in result["rows"] for name in row["arms"])
    return [name for name in names if name != "ours" and ratios(result, name)]


def _cell(row, name):
    seconds = median(row["arms"].get(name, {}))
    if seconds is None:
        return "-"
    # Rows with few tokens are bound by reading the weights: microseconds say more than TFLOP/s.
    if row["decode"]:
        return f"{seconds * 1e6:.1f} us"
    return f"{row['flops'] / seconds / 1e12:.3g}"


def _size(count):
    if count is None:
        return "-"
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e3:.1f} KB"


def markdown(result):
    """The whole result as one Markdown page."""
    facts = result["machine"]
    names = ["ours", *others(result)]
    lines = [
        f"# Benchmark of {result['date']}",
        "",
        f"{facts['nvidia_smi'] or facts['device']}; jax {facts['jax']}, torch {facts['torch']}.",
        "",
        "TFLOP/s of 2MNK operations (decode rows: microseconds per call), medians of interleaved bursts; in brackets",
        "our speed over that arm's. Temporary memory as XLA's analysis of the compiled program states it.",
        "",
        "| shape (L, M, N, K) | " + " | ".join(names) + " | temporary: ours | ragged_dot |",
        "|---|" + "---|" * (len(names) + 2),
    ]
    for row in result["rows"]:
        cells = [_cell(row, "ours")]
        for name in names[1:]:
            ratio = ratios(result, name).get(row["name"])
            cells.append(_cell(row, name) + (f" ({ratio:.2f}x)" if ratio else ""))
        memory = [_size(row["arms"].get(name, {}).get("temporary_bytes")) for name in ("ours", "ragged_dot")]
        shape = f"{row['name']} ({row['l']}, {row['m']}, {row['n']}, {row['k']}) {row['shares']}"
        lines.append("| " + " | ".join([shape, *cells, *memory]) + " |")
    lines.append("")
    for name in names[1:]:
        values = list(ratios(result, name).values())
        lines.append(
            f"- ours over {name}: geometric mean {geometric_mean(values):.2f}, "
            f"least {min(values):.2f} ({len(values)} rows)"
        )
    for row in result["rows"]:
        for name, arm in row["arms"].items():
            if arm.get("skipped"):
                lines.append(f"- {row['name']}, {name}: {arm['skipped']}")
    figures = result.get("figures", {})
    if host := figures.get("host_microseconds"):
        lines.append("- host time to queue a call: " + ", ".join(f"{name} {us:.1f} us" for name, us in host.items()))
    if first := figures.get("first_call_seconds"):
        if "failed" in first:
            lines.append(f"- first call in a fresh process failed: {first['failed']}")
        else:
            lines.append(
                f"- first call in a fresh process: import {first['import']:.2f} s, ours {first['ours']:.2f} s, "
                f"a plain product {first['jnp_dot']:.2f} s"
            )
    if wheel := figures.get("wheel_bytes"):
        lines.append(f"- wheel: {wheel / 1e6:.2f} MB")
    return "\n".join(lines) + "\n"


def write_json(result, folder, stem):
    """Writes STEM.json. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def write(result, folder, stem):
    """Writes STEM.json, STEM.md and, with matplotlib, STEM.png. Returns their paths."""
    paths = [write_json(result, folder, stem), folder / f"{stem}.md"]
    paths[1].write_text(markdown(result))
    if plot(result, folder / f"{stem}.png"):
        paths.append(folder / f"{stem}.png")
    return paths


def plot(result, path):
    """TFLOP/s by shape and arm. Returns False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [(title, rows) for title, rows in _panels(result) if rows]
    names = ["ours", *others(result)]
    figure, axes = plt.subplots(len(panels), 1, figsize=(11, 4 * len(panels)), squeeze=False)
    for axis, (title, rows) in zip(axes[:, 0], panels, strict=True):
        for place, name in enumerate(names):
            heights = [_tflops(row, name) for row in rows]
            left = [x + (place - (len(names) - 1) / 2) * 0.8 / len(names) for x in range(len(rows))]
            bars = axis.bar(left, heights, 0.8 / len(names), label=name)
            axis.bar_label(bars, [f"{height:.0f}" if height else "" for height in heights], fontsize=7)
        axis.set_xticks(range(len(rows)), [row["name"] for row in rows])
        axis.set_ylabel("TFLOP/s")
        axis.set_title(title)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(frameon=False, ncols=len(names), loc="upper center", bbox_to_anchor=(0.5, 1.25))
    figure.suptitle(f"Grouped GEMM, {result['machine']['device']}, {result['date'][:10]}")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def _tflops(row, name):
    seconds = median(row["arms"].get(name, {}))
    return row["flops"] / seconds / 1e12 if seconds else 0


def _panels(result):
    for product in ("forward", "dgrad", "wgrad"):
        rows = [row for row in result["rows"] if row.get("product", "forward") == product]
        yield f"{product}, many rows (compute bound)", [row for row in rows if not row["decode"]]
        yield f"{product}, few rows (memory bound)", [row for row in rows if row["decode"]]
