"""Results as text, Markdown, JSON and a plot. A result is the dictionary that `run.py` fills."""

import json

from jax_grouped_gemm.timing import geometric_mean, summarize


def median(arm):
    """Median seconds per call of one arm's record, or None when it has no samples."""
    return summarize(arm["samples"]).median if arm.get("samples") else None


def seconds(row, name):
    """Median seconds per call of one arm in a row, or None. The dense product of few rows, which reads the weights of one
    expert only, is no measure for reading those of all."""
    if name == "cublas_dense" and row["decode"]:
        return None
    return median(row["arms"].get(name, {}))


def ratios(rows, other):
    """Our speed over another arm's for every row that has both: {row name: ratio}."""
    found = {}
    for row in rows:
        ours, theirs = seconds(row, "ours"), seconds(row, other)
        if ours and theirs:
            found[row["name"]] = theirs / ours
    return found


def timed(rows):
    """Arms that were timed in at least one row: ours first, others in order of first appearance."""
    names = dict.fromkeys(name for row in rows for name in row["arms"] if seconds(row, name))
    return sorted(names, key=lambda name: name != "ours")


def listed(result):
    """The rows that belong to no sweep."""
    return [row for row in result["rows"] if not row.get("sweep")]


def sweeps(result):
    """{(sweep, product): its rows}."""
    found: dict[tuple[str, str], list] = {}
    for row in result["rows"]:
        if row.get("sweep"):
            found.setdefault((row["sweep"], row["product"]), []).append(row)
    return found


def roofline(row, bandwidth):
    """(Seconds that the row takes at least, what bounds it): its bytes at a copy's bandwidth, or its operations at the rate
    of cuBLAS's dense product of the same size, where that was timed."""
    bounds = {"bytes": row["bytes"] / bandwidth}
    if dense := seconds(row, "cublas_dense"):
        bounds["operations"] = dense
    bound = max(bounds, key=bounds.__getitem__)
    return bounds[bound], bound


def _cell(row, name):
    taken = seconds(row, name)
    if taken is None:
        return "-"
    # Rows with few tokens are bound by reading the weights: microseconds say more than TFLOP/s.
    if row["decode"]:
        return f"{taken * 1e6:.1f} us"
    return _rate(row["flops"] / taken / 1e12)


def _rate(tflops):
    return f"{tflops:.0f}" if tflops >= 100 else f"{tflops:.3g}"


def _size(count):
    if count is None:
        return "-"
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e3:.1f} KB"


def _shape(row):
    return f"{row['name']} ({row['l']}, {row['m']}, {row['n']}, {row['k']}) {row['shares']}"


def _table(rows):
    """Lines: every arm of these rows, then our speed over the others'."""
    names = timed(rows)
    of_xla = [name for name in ("ours", "ragged_dot") if any(name in row["arms"] for row in rows)]
    columns = ["shape (L, M, N, K)", *names, *(f"temporary: {name}" for name in of_xla)]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = []
        for name in names:
            ratio = None if name == "ours" else ratios([row], name).get(row["name"])
            cells.append(_cell(row, name) + (f" ({ratio:.2f}x)" if ratio else ""))
        memory = [_size(row["arms"].get(name, {}).get("temporary_bytes")) for name in of_xla]
        lines.append("| " + " | ".join([_shape(row), *cells, *memory]) + " |")
    means = []
    for name in names:
        values = list(ratios(rows, name).values())
        if name != "ours" and values:
            means.append(
                f"- ours over {name}: geometric mean {geometric_mean(values):.2f}, "
                f"least {min(values):.2f} ({len(values)} rows)"
            )
    return lines + (["", *means] if means else [])


def _roofline_table(rows, bandwidth):
    lines = [
        "",
        "## Roofline",
        "",
        f"A copy moves {bandwidth / 1e12:.3g} TB/s. Predicted: the larger of the bytes that must move at that rate, and the",
        "operations at the rate of cuBLAS's dense product in the same row, where it was timed.",
        "",
        "| shape (L, M, N, K) | GFLOP | MB | predicted | bound by | ours | predicted over ours |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        least, bound = roofline(row, bandwidth)
        ours = seconds(row, "ours")
        measured = (f"{ours * 1e6:.1f} us", f"{least / ours:.0%}") if ours else ("-", "-")
        sizes = f"{row['flops'] / 1e9:.4g}", f"{row['bytes'] / 1e6:.4g}"
        lines.append("| " + " | ".join([_shape(row), *sizes, f"{least * 1e6:.1f} us", bound, *measured]) + " |")
    return lines


def _notes(result):
    """Lines: why arms were left out, and the figures beside throughput."""
    lines = []
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in result["rows"]:
        for name, arm in row["arms"].items():
            if arm.get("skipped"):
                reasons.setdefault((name, arm["skipped"]), []).append(row["name"])
    for (name, reason), rows in reasons.items():
        where = "every row" if len(rows) == len(result["rows"]) > 1 else ", ".join(rows)
        lines.append(f"- {where}, {name}: {reason}")
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
    return lines


def markdown(result):
    """The whole result as one Markdown page."""
    facts = result["machine"]
    lines = [
        f"# Benchmark of {result['date']}",
        "",
        f"{facts['nvidia_smi'] or facts['device']}; jax {facts['jax']}, torch {facts['torch']}.",
        "",
        "TFLOP/s of 2MNK operations (decode rows: microseconds per call), medians of interleaved bursts; in brackets",
        "our speed over that arm's. Temporary memory as XLA's analysis of the compiled program states it.",
        "",
    ]
    if rows := listed(result):
        lines += _table(rows)
    for (sweep, product), rows in sweeps(result).items():
        lines += ["", f"## Sweep {sweep}, {product}", "", *_table(rows)]
    if bandwidth := result.get("copy_bytes_per_second"):
        lines += _roofline_table(result["rows"], bandwidth)
    if notes := _notes(result):
        lines += ["", "## Notes", "", *notes]
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
    """TFLOP/s by arm: bars for the listed rows, lines for the sweeps. Returns False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = draw(result, plt)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def draw(result, plt):
    """The figure: a panel of bars is as wide as the page, two of lines share a line of it."""
    bars = [(title, rows) for title, rows in _panels(result) if rows]
    lines = sweeps(result)
    line_rows = -(-len(lines) // 2)
    # An arm has one colour in all panels.
    colors = {name: f"C{i}" for i, name in enumerate(timed(result["rows"]))}
    height = 3.6 * len(bars) + 4.2 * line_rows + 1
    figure = plt.figure(figsize=(13, height), layout="constrained")
    grid = figure.add_gridspec(len(bars) + line_rows, 2, height_ratios=[3.6] * len(bars) + [4.2] * line_rows)
    for place, (title, rows) in enumerate(bars):
        _draw_bars(figure.add_subplot(grid[place, :]), title, rows, colors, result.get("copy_bytes_per_second"))
    for place, ((sweep, product), rows) in enumerate(lines.items()):
        axis = figure.add_subplot(grid[len(bars) + place // 2, place % 2])
        _draw_sweep(axis, sweep, product, rows, colors, result.get("copy_bytes_per_second"))
    legend: dict[str, object] = {}
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
        handles, labels = axis.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    labels = sorted(legend, key=lambda label: label not in colors)  # the limit last
    title = f"Grouped GEMM, {result['machine']['device']}, {result['date'][:10]}"
    figure.legend(
        [legend[label] for label in labels], labels, title=title, ncols=4, frameon=False, loc="outside upper center"
    )
    return figure


def _tflops(row, name):
    taken = seconds(row, name)
    return row["flops"] / taken / 1e12 if taken else 0


def _panels(result):
    rows = listed(result)
    for product in ("forward", "dgrad", "wgrad"):
        of_product = [row for row in rows if row.get("product", "forward") == product]
        yield f"{product}, many rows (compute bound)", [row for row in of_product if not row["decode"]]
        yield f"{product}, few rows (memory bound)", [row for row in of_product if row["decode"]]


def _gigabytes(row, name):
    taken = seconds(row, name)
    return row["bytes"] / taken / 1e9 if taken else 0


def _draw_bars(axis, title, rows, colors, bandwidth):
    names, decode = timed(rows), rows[0]["decode"]
    for place, name in enumerate(names):
        heights = [(_gigabytes if decode else _tflops)(row, name) for row in rows]
        left = [x + (place - (len(names) - 1) / 2) * 0.8 / len(names) for x in range(len(rows))]
        bars = axis.bar(left, heights, 0.8 / len(names), label=name, color=colors[name])
        axis.bar_label(bars, [_rate(height) if height else "" for height in heights], fontsize=7)
    if decode and bandwidth:
        axis.axhline(bandwidth / 1e9, color="k", linestyle="--", linewidth=1, label=LIMIT)
    axis.set_xticks(range(len(rows)), [row["name"] for row in rows])
    axis.set_ylabel("GB/s of what must move" if decode else "TFLOP/s")
    axis.set_title(title)


LIMIT = "bytes at a copy's bandwidth"
# What varies in a sweep, and the extents that do not.
AXES = {
    "rows_per_group": ("rows per group", "LNK"),
    "experts": ("experts", "MNK"),
    "skew": ("how the rows are shared", "LMNK"),
}


def _draw_sweep(axis, sweep, product, rows, colors, bandwidth):
    places = range(len(rows)) if sweep == "skew" else [row["x"] for row in rows]
    for name in timed(rows):
        points = [(x, _tflops(row, name)) for x, row in zip(places, rows, strict=True) if seconds(row, name)]
        axis.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name, color=colors[name])
    if sweep == "rows_per_group":
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        if bandwidth:
            limits = [row["flops"] * bandwidth / row["bytes"] / 1e12 for row in rows]
            axis.plot(places, limits, "k--", linewidth=1, label=LIMIT)
    if sweep == "skew":
        axis.set_xticks(places, [row["x"].replace("_", " ").replace(", ", "\n") for row in rows])
    else:
        axis.set_xscale("log", base=2)
        axis.set_xticks(places, map(str, places))
        axis.minorticks_off()
    if sweep != "rows_per_group":
        axis.set_ylim(bottom=0)
    axis.set_ylabel("TFLOP/s")
    label, same = AXES[sweep]
    axis.set_xlabel(label)
    axis.set_title(f"{product}: " + ", ".join(f"{size} = {rows[0][size.lower()]}" for size in same))
