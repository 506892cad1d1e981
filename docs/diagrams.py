"""One diagram for each variant, drawn from the table that the model runs on.

Above, a grid: a row for each source, oldest first, a column for each reader; a square where the
reader reads the source, a ring where the source is made. Below, the sublayers and the stream.
"""

from deltares_jax.models import variants

LAYERS, BLOCKS = 4, 2  # as in configs/debug.py
_LEFT, _COLUMN, _ROW, _SQUARE = 150, 92, 22, 12
_STREAM = {"accumulate": "stream", "restart": "stream: block sum", "discard": ""}


def _text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="12" fill="currentColor">'
        f"{words}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, more: str = "") -> str:
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="currentColor" '
        f'stroke-width="1.5" {more}/>'
    )


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return _line(x1, y1, x2, y2, 'marker-end="url(#ARROW)"')


def _middle(column: float) -> float:
    return _LEFT + (column + 0.5) * _COLUMN


def _grid(read: dict[str, list[str]], rows: list[str], columns: list[str]) -> list[str]:
    """Labels, squares where a source is read, a thin line along each source."""
    parts = []
    for place, source in enumerate(rows):
        y = (place + 0.5) * _ROW
        label = source.replace("_", " ")
        parts.append(_text(_LEFT - 14, y + 4, label, "end"))
        end = _LEFT + len(columns) * _COLUMN
        parts.append(_line(_LEFT, y, end, y, 'stroke-opacity="0.15"'))
        parts += [
            f'<rect x="{_middle(column) - _SQUARE / 2:g}" y="{y - _SQUARE / 2:g}" '
            f'width="{_SQUARE}" height="{_SQUARE}" rx="2" '
            'fill="var(--md-accent-fg-color, #526cfe)" '
            f'data-reader="{reader}" data-source="{source}"/>'
            for column, reader in enumerate(columns)
            if source in read.get(reader, [])
        ]
    return parts


def _born(variant: str, slots: list[str]) -> list[str]:
    """A ring for each source, after the sublayer that completes it."""
    row = variants.VARIANTS[variant]
    parts = []
    for place in range(len(slots)):
        made = place - row.seeded + 1  # how many sublayers, or blocks, come before it
        if row.grows == "block":
            lengths = variants.block_lengths(variant, LAYERS, BLOCKS)
            made = 2 * sum(lengths[:made])
        parts.append(
            f'<circle cx="{_LEFT + made * _COLUMN:g}" cy="{(place + 0.5) * _ROW:g}" r="4" '
            'fill="none" stroke="currentColor" stroke-width="1.5"/>'
        )
    return parts


def _sublayers(variant: str, read: dict[str, list[str]], top: float) -> list[str]:
    """Boxes, what goes into each and out of it, and the stream."""
    row = variants.VARIANTS[variant]
    box, stream = top + 42, top + 104
    sites = list(variants.sites(variant, LAYERS, BLOCKS))
    parts = []
    for column, (reader, *_) in enumerate(sites):
        x = _middle(column)
        parts += [
            f'<rect x="{x - 31:g}" y="{box:g}" width="62" height="26" rx="4" fill="none" '
            'stroke="currentColor" stroke-width="1.5"/>',
            _text(x, box + 17, f"{reader.split('.')[2]} {reader.split('.')[1]}"),
        ]
        if reader in read:
            parts.append(_arrow(x, top + 6, x, box - 3))
            parts.append(_text(x + 6, top + 24, "mix", "start"))
        if row.routing != "replace":
            parts.append(_arrow(x - 20, stream, x - 20, box + 29))
            parts.append(_text(x - 26, stream - 18, "h", "end"))
        parts.append(_arrow(x + 20, box + 26, x + 20, stream - 3))
        parts.append(_text(x + 26, stream - 18, "y" if row.stream == "discard" else "+y", "start"))
    width = LAYERS * 2 * _COLUMN
    if row.stream == "accumulate":
        spans = [(0.0, float(width))]
    elif row.stream == "restart":
        ends = [2 * _COLUMN * n for n in variants.block_lengths(variant, LAYERS, BLOCKS)]
        spans = [(sum(ends[:n]) + 20.0, sum(ends[: n + 1])) for n in range(len(ends))]
    else:
        spans = []
    parts += [_line(_LEFT + a, stream, _LEFT + b, stream, 'class="stream"') for a, b in spans]
    if spans:
        parts.append(_text(_LEFT - 14, stream + 4, _STREAM[row.stream], "end"))
    end = _LEFT + width + 14
    parts.append(_text(end, box + 17 if row.final_read else stream + 4, "→ final norm", "start"))
    if row.final_read:
        parts.append(_arrow(_middle(len(sites)), top + 6, _middle(len(sites)), box - 3))
    return parts


def diagram(variant: str) -> str:
    """The diagram of a variant as an SVG element, at four layers in two blocks."""
    row = variants.VARIANTS[variant]
    read = variants.source_names(variant, LAYERS, BLOCKS)
    slots = variants.slot_names(variant, LAYERS, BLOCKS)
    rows = slots + ["stream"] * (row.live != "never")
    columns = [reader for reader, *_ in variants.sites(variant, LAYERS, BLOCKS)]
    columns += ["final"] * row.final_read
    top = len(rows) * _ROW
    height, width = top + 122, _LEFT + (2 * LAYERS + 1) * _COLUMN + 40
    parts = _grid(read, rows, columns) + _born(variant, slots) + _sublayers(variant, read, top)
    if row.grows == "block":
        ends = variants.block_lengths(variant, LAYERS, BLOCKS)[:-1]
        places = [_LEFT + 2 * _COLUMN * sum(ends[: n + 1]) for n in range(len(ends))]
        parts += [_line(x, 0, x, height, 'stroke-dasharray="3 4"') for x in places]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" role="img" '
        f'aria-label="{variant}: who reads which source">'
        '<defs><marker id="ARROW" markerWidth="7" markerHeight="7" refX="5" refY="3" '
        'orient="auto"><path d="M0,0 L6,3 L0,6 z" fill="currentColor"/></marker></defs>'
        f"{''.join(parts)}</svg>"
    ).replace("ARROW", f"arrow-{variant}")
