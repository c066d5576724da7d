"""The latent codes of one or several models as one HTML file that needs nothing else, with a scatter to explore."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from hyla.report import document, latents
from hyla.report.latents import Data, Number

Matrix = Sequence[Sequence[Number | None] | None]


def write_latents_page(folder: Path | str, analysis: Data) -> Path:
    """Write `index.html` into `folder`, which the `run` of each model is relative to."""
    analysis = latents.checked(analysis)
    library = document.plotly_js()
    path = Path(folder) / "index.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(analysis, library), encoding="utf-8")
    return path


def page(analysis: Data, plotly_js: str) -> str:
    """The whole page as text, with `plotly_js` inside it once."""
    title = escape(analysis["title"])
    sections = [
        _section("Where the codes lie", _scatter(analysis)),
        _section("What a probe reads from them", _probes(analysis)),
        _section("The mean code of each class", _per_model(analysis, _mean_codes)),
        _section("How alike the classes are", _per_model(analysis, _cosines)),
        _causal(analysis),
        _section("Models", _models(analysis)),
        _section("Method", f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in analysis['notes'])}</ul>"),
        _section("Repeat it", f"<pre><code>{escape(analysis['command'])}</code></pre>"),
    ]
    eyebrow = '<p class="eyebrow">Latent codes of attention</p>'
    main = f"<header>{eyebrow}<h1>{title}</h1>{_headlines(analysis)}</header>\n{''.join(sections)}"
    return document.document(title, _CSS, main, plotly_js, "page-data", _page_data(analysis), _JS)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>\n" if body else ""


def _per_model(analysis: Data, body: Callable[[Data], str]) -> str:
    """The same for every model, side by side."""
    blocks = []
    for model, label in zip(analysis["models"], latents.model_labels(analysis), strict=True):
        inner = body(model)
        blocks.append(f'<div class="model"><h3>{_swatch(model)}{escape(label)}</h3>{inner}</div>' if inner else "")
    return f'<div class="models">{"".join(blocks)}</div>' if any(blocks) else ""


def _swatch(model: Data) -> str:
    return f'<i class="dot" style="background:{latents.mechanism_colour(model["mechanism"])}"></i>'


def _headlines(analysis: Data) -> str:
    pairs = zip(analysis["models"], latents.model_labels(analysis), strict=True)
    items = [
        f"<li>{_swatch(model)}<strong>{escape(label)}:</strong> {escape(latents.headline(model))}</li>"
        for model, label in pairs
    ]
    lead = (
        "The latent code of a pair of query and key is what its attention heads score for it, one number per head. "
        "Does it tell which operation the model applies?"
    )
    return f'<p class="lead">{lead}</p><ul class="note">{"".join(items)}</ul>'


# --- tables -----------------------------------------------------------------------------------------------------------


def _number_cell(value: Number | None, text: str | None = None) -> str:
    """A cell that sorts by `value`; cells without one always come last."""
    shown = latents.format_value(value)
    key = "" if shown == latents.NO_VALUE else repr(value)
    return f'<td class="number" data-sort="{key}">{escape(shown if text is None else text)}</td>'


def _text_cell(text: str, small: str = "") -> str:
    more = f"<small>{escape(small)}</small>" if small else ""
    return f'<td data-sort="{escape(text)}">{escape(text)}{more}</td>'


def _probes(analysis: Data) -> str:
    panels = latents.probe_panels(analysis)
    plots = "".join(
        f'<figure class="plot" id="scores-{i}" aria-label="{escape(panel.title)}, by layer"></figure>'
        for i, panel in enumerate(panels)
    )
    named = zip(analysis["models"], latents.model_labels(analysis), strict=True)
    key = "".join(f'<span class="key">{_swatch(model)}{escape(label)}</span>' for model, label in named)
    key += "● score with its 95% interval, □ the same probe fitted to shuffled labels (up to the largest), — chance."
    chart = f'<div class="plots">{plots}</div><p class="fine">{key}</p>' if panels else ""
    return chart + _probe_table(analysis) + _per_model(analysis, _rules_and_examples)


def _probe_table(analysis: Data) -> str:
    names = ["model", "layer", "probe", "target", "fitted on", "scored on", "metric", "score", "95% interval", "chance"]
    names += ["shuffled labels", "at most", "pairs", "tasks"]
    numeric = {"score", "95% interval", "chance", "shuffled labels", "at most", "pairs", "tasks"}
    heads = "".join(
        f'<th scope="col" class="{"number" if name in numeric else ""}"><button type="button">{name}</button></th>'
        for name in names
    )
    rows = []
    for model, label in zip(analysis["models"], latents.model_labels(analysis), strict=True):
        best = latents.best_layer(model)
        marked = None if best is None else latents.main_scores(model)[best]
        for at, layer in enumerate([*model["layers"], *model.get("others", [])]):
            for score in layer["probes"]:
                low, high = score["low"], score["high"]
                cells = [
                    f'<th scope="row" data-sort="{escape(label)}">{_swatch(model)}{escape(label)}</th>',
                    f'<td data-sort="{at:04d}">{escape(layer["title"])}</td>',
                    _text_cell(score["probe"], score["note"]),
                    _text_cell(score["target"]),
                    _text_cell(score["train"]),
                    _text_cell(score["test"]),
                    _text_cell(latents.metric_label(score["metric"])),
                    _number_cell(score["value"]),
                    _number_cell(low, latents.format_interval(low, high)),
                    _number_cell(score["chance"]),
                    _number_cell(score["control"]),
                    _number_cell(score["control_high"]),
                    _number_cell(score["count"], _whole(score["count"])),
                    _number_cell(score["tasks"], _whole(score["tasks"])),
                ]
                css = "best" if score is marked else ""
                rows.append(f'<tr class="{css}">{"".join(cells)}</tr>')
    table = f'<table class="sortable"><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    note = "Click a column’s title to sort. Bold: the score that the sentence at the top is about. – : undefined."
    return f'<h3>All scores</h3><div class="scroll">{table}</div><p class="fine">{note}</p>' if rows else ""


def _whole(count: int | None) -> str:
    return latents.NO_VALUE if count is None else f"{count:,}"


def _models(analysis: Data) -> str:
    names = ["model", "run", "task", "step", "heads", "pairs read", "split", "pairs", "tasks", "model’s score"]
    numeric = {"step", "heads", "pairs", "tasks", "model’s score"}
    heads = "".join(f'<th scope="col" class="{"number" if name in numeric else ""}">{name}</th>' for name in names)
    rows = []
    for model, label in zip(analysis["models"], latents.model_labels(analysis), strict=True):
        for split, one in model["splits"].items():
            name = escape(model["name"])
            run = f'<a href="{escape(quote(model["run"] + "/config.json"))}">{name}</a>' if model["run"] else name
            metric, score = next(((name, one[name]) for name in ("accuracy", "r2") if name in one), ("", None))
            shown = (
                None if score is None else f"{100 * score:.1f}% right" if metric == "accuracy" else f"R² {score:.3f}"
            )
            cells = [
                f'<th scope="row">{_swatch(model)}{escape(label)}</th><td>{run}</td><td>{escape(model["task"])}</td>',
                f'<td class="number">{model["step"]:,}</td><td class="number">{model["num_heads"]}</td>',
                f'<td class="wide">{escape(model["pairs"])}</td><td>{escape(latents.split_label(split))}</td>',
                _number_cell(one["count"], _whole(one["count"])) + _number_cell(one["tasks"], _whole(one["tasks"])),
                _number_cell(score, shown),
            ]
            rows.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


# --- heat maps --------------------------------------------------------------------------------------------------------


def _heat_table(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Matrix,
    top: Number,
    *,
    numbers: bool = True,
    words: Callable[[int, int], str] | None = None,
    groups: Sequence[tuple[str, int]] = (),
    outlined: bool = False,
    signed: bool = True,
    corner: str = "",
) -> str:
    """A matrix as a table whose cells are shaded from 0 to `top` (signed: and to -`top`, in two colours); hatched where
    there is no value. groups: (name, number of columns) of headings above them. words: what a cell shows on hover."""
    ends, at = set(), 0
    for _, size in groups:
        at += size
        ends.add(at - 1)
    above = "".join(f'<th colspan="{size}" scope="colgroup">{escape(name)}</th>' for name, size in groups)
    head = f"<tr><td></td>{above}</tr>" if groups else ""
    if any(columns):
        names = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
        head += f'<tr><th scope="col" class="corner">{escape(corner)}</th>{names}</tr>'
    body = []
    for i, name in enumerate(rows):
        cells, line = [], values[i] if i < len(values) else None
        for j in range(len(columns)):
            value = None if line is None else line[j]
            classes = ["end"] * (j in ends) + ["own"] * (outlined and i == j)
            cells.append(_heat_cell(value, top, signed, numbers, words(i, j) if words else "", classes))
        body.append(f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>')
    label = 0.95 * max(map(len, rows), default=0)
    kind = f'class="heat{"" if numbers else " small"}" style="--label:{label:.0f}ch"'
    return f'<div class="scroll"><table {kind}><thead>{head}</thead><tbody>{"".join(body)}</tbody></table></div>'


def _heat_cell(value: Number | None, top: Number, signed: bool, numbers: bool, words: str, classes: list[str]) -> str:
    short = latents.format_short(value)
    if short == latents.NO_VALUE or value is None:
        classes.append("none")
        style = ""
    else:
        share = min((abs(value) if signed else max(value, 0.0)) / top, 1.0)
        classes.append("share" if not signed else "minus" if value < 0 else "plus")
        classes += ["strong"] * (share > 0.7)
        style = f' style="--v:{100 * share:.0f}%"'
    title = f' title="{escape(f"{words}: {latents.format_value(value)}")}"' if words else ""
    return f'<td class="{" ".join(classes)}"{style}{title}>{short if numbers else ""}</td>'


def _layers(model: Data, body: Callable[[Data], str]) -> str:
    parts = [(layer["title"], body(layer)) for layer in model["layers"]]
    blocks = "".join(f'<div class="layer"><h4>{escape(title)}</h4>{inner}</div>' for title, inner in parts if inner)
    wide = " wide" if len(model["classes"]) > 9 else ""
    return f'<div class="layers{wide}">{blocks}</div>' if blocks else ""


def _numbered(model: Data) -> list[str]:
    return [f"{i + 1} {name}" for i, name in enumerate(model["classes"])]


def _mean_codes(model: Data) -> str:
    heads, classes = model["num_heads"], model["classes"]
    groups = [(key, heads) for key in model["keys"]]
    limits = latents.code_limits(model)

    def one(layer: Data) -> str:
        found, top = layer["mean_codes"], limits[layer["name"]]
        rows = [f"{name} ({_whole(count)})" for name, count in zip(classes, found["counts"], strict=True)]

        def words(i: int, j: int) -> str:
            return f"{classes[i]}, {model['keys'][j // heads]}, head {j % heads + 1}"

        columns = [""] * (heads * len(groups))
        table = _heat_table(rows, columns, found["values"], top, numbers=False, words=words, groups=groups)
        return f'<p class="fine">{_scale(top)}</p>{table}'

    splits = " and ".join(dict.fromkeys(latents.split_label(layer["mean_codes"]["split"]) for layer in model["layers"]))
    note = f"{splits}; in brackets the pairs. A column per head, grouped by key; hatched: no such pair."
    return _layers(model, one) + f'<p class="fine">{escape(note[0].upper() + note[1:])}</p>'


def _scale(top: Number) -> str:
    ends = latents.format_short(-top), latents.format_short(top)
    return f'<span class="scale">{ends[0]} <i></i> {ends[1]}</span>'


def _cosines(model: Data) -> str:
    names, numbers = _numbered(model), [str(i + 1) for i in range(len(model["classes"]))]

    def words(i: int, j: int) -> str:
        return f"{model['classes'][i]} and {model['classes'][j]}"

    note = f"Cosine between the mean codes of each two classes ({model['label']}); hatched: undefined."
    text = _layers(model, lambda layer: _heat_table(names, numbers, layer["cosines"], 1.0, words=words))
    text += f'<p class="fine">{escape(note)}</p>'
    if len(model["layers"]) > 1 and model["layer_similarity"]:
        titles = [layer["title"] for layer in model["layers"]]
        table = _heat_table(titles, [str(i + 1) for i in range(len(titles))], model["layer_similarity"], 1.0)
        text += f"<h4>Correlation of these cosines between layers</h4>{table}"
    return text


def _rules_and_examples(model: Data) -> str:
    text, layers = "", model["layers"]
    titles = [layer["title"] for layer in layers]
    if any(layer["per_class"] for layer in layers):
        f1_CL, counts = latents.rule_table(model)
        rows = [f"{name} ({_whole(count)})" for name, count in zip(model["classes"], counts, strict=True)]
        found = [{one["class"]: one for one in layer["per_class"]} for layer in layers]

        def words(i: int, j: int) -> str:
            one = found[j].get(model["classes"][i], {})
            parts = [f"{name} {latents.format_value(one.get(name))}" for name in ("precision", "recall")]
            return f"{model['classes'][i]}, {titles[j]}, {', '.join(parts)}, F1"

        table = _heat_table(rows, titles, f1_CL, 1.0, words=words, signed=False)
        text += f"<h4>F1 of every {escape(model['label'])} (pairs tested)</h4>{table}"
    examples = list(dict.fromkeys(one["examples"] for layer in layers for one in layer["few_shot"]))
    if examples:
        body = []
        for number in examples:
            cells = []
            for layer in layers:
                one = next((one for one in layer["few_shot"] if one["examples"] == number), None)
                cells.append(f"<td>{latents.NO_VALUE}</td>" if one is None else _few_shot_cell(one))
            body.append(f'<tr><th scope="row">{number}</th>{"".join(cells)}</tr>')
        heads = "".join(f'<th scope="col">{escape(title)}</th>' for title in ["examples", *titles])
        table = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table>"
        title = f"Macro F1 from few examples of each {model['label']}"
        text += f'<h4>{escape(title)}</h4><div class="scroll">{table}</div>'
    return text


def _few_shot_cell(one: Data) -> str:
    interval = latents.format_interval(one["low"], one["high"])
    more = [text for text in (interval if interval != latents.NO_VALUE else "", one["note"]) if text]
    small = f"<small>{escape('; '.join(more))}</small>" if more else ""
    return f"<td>{latents.format_value(one['value'])}{small}</td>"


# --- the causal check -------------------------------------------------------------------------------------------------

CONTROL = (
    "The codes of a layer are replaced by a mean code, and the model answers again. The control replaces them by the mean "
    "code of their own class: that takes away what is particular to a sequence but leaves the class as it was, so what it "
    "changes is the cost of replacing anything. Only what the mean code of another class changes beyond that shows that "
    "the model uses the code to choose its operation."
)


def _causal(analysis: Data) -> str:
    checks = [layer["causal"] for model in analysis["models"] for layer in model["layers"] if layer["causal"]]
    cells: dict[str, Number] = {}  # where the scales end: the same for all models, by unit
    bars: dict[str, Number] = {}
    for one in checks:
        unit, values = one["effect_unit"], [v for row in one["effect"] if row for v in row if v is not None]
        ends = [one[name] for name in ("same", "other", "other_high") if one[name] is not None]
        cells[unit] = max([cells.get(unit, 0.0), *values])
        bars[unit] = max([bars.get(unit, 0.0), *ends])
    body = _per_model(analysis, lambda model: _causal_model(model, cells, bars))
    return _section("Does the code decide the answer?", f"<p>{CONTROL}</p>{body}" if body else "")


def causal_sentence(model: Data, layer: Data) -> str:
    """What the check found in one layer, against its control, in words and numbers."""
    one, text = layer["causal"], latents.format_value
    interval = latents.format_interval(one["other_low"], one["other_high"])
    sentence = (
        f"{layer['title'].capitalize()}, {one['effect_unit']}: {text(one['same'])} with the mean code of the same "
        f"{model['label']} (the control), {text(one['other'])} (95% interval {interval}) with that of another, "
        f"{latents.count_of(one['count'], None)}."
    )
    if one["same"] is not None and one["other_low"] is not None:
        beyond = (
            "The effect lies beyond the control." if one["other_low"] > one["same"] else "No more than the control."
        )
        sentence += f" {beyond}"
    if one["follows"] is not None:
        sentence += f" Answers that the other {model['label']} gives: {text(one['follows_before'])} before, "
        sentence += f"{text(one['follows'])} after."
    return sentence


def _causal_model(model: Data, cells: dict[str, Number], bars: dict[str, Number]) -> str:
    numbers = [str(i + 1) for i in range(len(model["classes"]))]
    checked = [layer for layer in model["layers"] if layer["causal"]]
    if not checked:
        return ""

    def one(layer: Data) -> str:
        if not layer["causal"]:
            return ""
        found, classes = layer["causal"], model["classes"]

        def words(i: int, j: int) -> str:
            return f"{classes[i]}, replaced by {'its own mean' if i == j else classes[j]}, {found['effect_unit']}"

        unit = found["effect_unit"]
        top = cells[unit] or 1.0
        corner = "class ↓ replaced by →"
        table = _heat_table(
            _numbered(model), numbers, found["effect"], top, words=words, outlined=True, signed=False, corner=corner
        )
        sentence = escape(causal_sentence(model, layer))
        return f'{_effect_bars(model, found, bars[unit] or 1.0)}<p class="fine">{sentence}</p>{table}'

    split = latents.split_label(checked[0]["causal"]["split"]).capitalize()
    note = f"{split}. Outlined: the control. Hatched: no such pair."
    return _layers(model, one) + f'<p class="fine">{escape(note)}</p>'


def _effect_bars(model: Data, causal: Data, top: Number) -> str:
    """The control above the effect, as bars on a scale shared by the layers, with the interval of the effect."""
    width, left, colour = 340, 112, latents.mechanism_colour(model["mechanism"])
    scale = (width - left - 44) / top
    parts = []
    for y, name, value in ((2, "own mean (control)", causal["same"]), (22, "another’s mean", causal["other"])):
        parts.append(f'<text x="{left - 6}" y="{y + 11}" text-anchor="end">{name}</text>')
        if value is None:
            parts.append(f'<text x="{left}" y="{y + 11}">{latents.NO_VALUE}</text>')
            continue
        fill, end = ("none" if y == 2 else colour), left + scale * max(value, 0.0)
        parts.append(f'<rect x="{left}" y="{y}" width="{end - left:.1f}" height="14" fill="{fill}" stroke="{colour}"/>')
        if y != 2 and causal["other_low"] is not None and causal["other_high"] is not None:
            low, high = (left + scale * causal[name] for name in ("other_low", "other_high"))
            end = max(end, high)
            parts.append(f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + 7}" y2="{y + 7}" class="whisker"/>')
        parts.append(f'<text x="{end + 5:.1f}" y="{y + 11}">{latents.format_value(value)}</text>')
    label = f"{causal['effect_unit']}: control and effect"
    return f'<svg class="bars" viewBox="0 0 {width} 40" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


# --- the scatter ------------------------------------------------------------------------------------------------------


def _scatter(analysis: Data) -> str:
    models = analysis["models"]
    longest = max((model["layers"] for model in models), key=len, default=[])
    first = max([latents.best_layer(model) or 0 for model in models], default=0)
    layers = _buttons("layer", [layer["title"] for layer in longest], first)
    kinds = list(dict.fromkeys(model["label"] for model in models))
    colours = _buttons("colour", [" or ".join(kinds), "correct", "split"], 0)
    splits = latents.split_order(split for model in models for split in model["points"]["split"])
    symbols = ", ".join(f"{'●▲■◆'[i % 4]} {latents.split_label(split)}" for i, split in enumerate(splits))
    blocks = []
    for i, (model, label) in enumerate(zip(models, latents.model_labels(analysis), strict=True)):
        plot = f'<figure class="plot scatter" id="scatter-{i}" aria-label="projection of latent codes"></figure>'
        card = f'<pre class="card" id="card-{i}" hidden></pre>'
        chips = f'<div class="chips" id="chips-{i}" role="group" aria-label="colours of {escape(label)}"></div>'
        structure = f'<p class="fine lines" id="structure-{i}"></p>'
        blocks.append(
            f'<div class="model"><h3>{_swatch(model)}{escape(label)}</h3>{chips}'
            f'<div class="holder">{plot}{card}</div>{structure}</div>'
        )
    methods = dict.fromkeys(layer["projection"]["method"] for model in models for layer in model["layers"])
    named = " and ".join(latents.METHODS.get(method) or str(method) for method in methods)
    note = (
        f"{named} of the latent codes, a point per pair: {symbols}. Point at a dot, or tap it, to see its sequence; press "
        f"names to bring out their points; drag to zoom in, double-click for the whole. {latents.STRUCTURE_NOTE}"
    )
    return f"""<div class="controls"><div role="group" aria-label="layers"><span>Layer</span>{layers}</div>
<div role="group" aria-label="colours"><span>Colour</span>{colours}</div></div>
<noscript><p class="fine">The scatter needs JavaScript; tables and heat maps do not.</p></noscript>
<div class="models">{"".join(blocks)}</div><p class="fine">{escape(note)}</p>"""


def _buttons(name: str, texts: Iterable[str], pressed: int) -> str:
    return "".join(
        f'<button type="button" data-{name}="{i}" aria-pressed="{str(i == pressed).lower()}">{escape(text)}</button>'
        for i, text in enumerate(texts)
    )


def _page_data(analysis: Data) -> Data:
    """All that the script draws. Names are escaped where they become HTML or a label of plotly's, which reads tags."""
    texts: dict[str, int] = {}
    models = [_scatter_data(model, texts) for model in analysis["models"]]
    panels = [_panel_data(analysis, panel) for panel in latents.probe_panels(analysis)]
    return {"models": models, "panels": panels, "texts": list(texts), "lowest": latents.LOWEST}


def _scatter_data(model: Data, texts: dict[str, int]) -> Data:
    """Points with those of the first split first, so that the others are drawn over them."""
    points, classes = model["points"], model["classes"]
    splits = latents.split_order(points["split"])
    order = sorted(range(len(points["class"])), key=lambda i: splits.index(points["split"][i]))
    layers = []
    for layer in model["layers"]:
        x, y = layer["projection"]["x"], layer["projection"]["y"]
        spots = latents.crowded_spots(x, y, points["class"], len(classes))
        layers.append(
            {
                "title": escape(layer["title"]),
                "x": [_short(x[i]) for i in order],
                "y": [_short(y[i]) for i in order],
                "spots": [None if spot is None else [_short(spot[0]), _short(spot[1])] for spot in spots],
                "structure": latents.structure_text(layer),
            }
        )
    return {
        "layers": layers,
        "classes": classes,
        "colours": [latents.colour_of(i) for i in range(len(classes))],
        "splits": [latents.split_label(split) for split in splits],
        "class": [points["class"][i] for i in order],
        "split": [splits.index(points["split"][i]) for i in order],
        "correct": [points["correct"][i] for i in order],
        "task": [texts.setdefault(str(points["task"][i]), len(texts)) for i in order],
        "text": [texts.setdefault(points["text"][i], len(texts)) for i in order],
    }


def _short(value: Number) -> float:
    """A coordinate to 4 digits: a picture has no use for more, and the file is smaller."""
    return float(f"{value:.4g}")


def _panel_data(analysis: Data, panel: latents.ProbePanel) -> Data:
    labels, series = latents.model_labels(analysis), []
    step = min(0.16, 0.7 / len(panel.series))
    for place, (index, scores) in enumerate(panel.series):
        shown = [(at, s) for at, s in enumerate(scores) if s and latents.format_value(s["value"]) != latents.NO_VALUE]
        series.append(
            {
                "name": escape(labels[index]),
                "colour": latents.mechanism_colour(analysis["models"][index]["mechanism"]),
                "x": [at + (place - (len(panel.series) - 1) / 2) * step for at, _ in shown],
                "words": [_score_words(score) for _, score in shown],
                **{
                    name: [score[name] for _, score in shown]
                    for name in ("value", "low", "high", "chance", "control", "control_high")
                },
            }
        )
    layers = max((analysis["models"][index]["layers"] for index, _ in panel.series), key=len)
    titles = [escape(layer["title"]) if len(layers) <= 6 else str(at + 1) for at, layer in enumerate(layers)]
    return {
        "title": escape(panel.title),
        "subtitle": escape(panel.subtitle),
        "titles": titles,
        "step": step,
        "series": series,
    }


def _score_words(score: Data) -> str:
    show = latents.format_value
    lines = [
        f"{latents.metric_label(score['metric'])} {show(score['value'])}",
        f"95% interval {latents.format_interval(score['low'], score['high'])}",
        f"chance {show(score['chance'])}, shuffled labels {show(score['control'])}",
        latents.count_of(score["count"], score["tasks"]),
        score["note"],
    ]
    return "<br>".join(escape(line) for line in lines if line)


_CSS = """
:root { --ink: #1b2026; --soft: #5a636e; --line: #dfe3e8; --paper: #ffffff; --panel: #f6f7f9; --accent: #0a6f8f;
  --note-edge: #0a6f8f; --note: #eef6f9; --grid: #e6e9ed; --shade: #00000026; --plus: #b2182b; --minus: #2166ac;
  --share: #08519c;  --on-strong: #ffffff; --hatch: #c3c9d0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --soft: #9aa4b0; --line: #2d333b; --paper: #15181d; --panel: #1d2127; --accent: #5cc3e3;
    --note-edge: #5cc3e3; --note: #16262d; --grid: #2a3038; --shade: #ffffff33; --plus: #ff8f73; --minus: #6db3f2;
    --share: #6db3f2;    --on-strong: #101317; --hatch: #474f59; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 1080px; margin: 0 auto; padding: 36px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 14px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 44px 0 12px; padding-top: 14px; border-top: 1px solid var(--line); }
h3 { font-size: 15px; margin: 18px 0 6px; overflow-wrap: anywhere; }
h4 { font-size: 14px; font-weight: 600; margin: 14px 0 4px; overflow-wrap: anywhere; }
.eyebrow { margin: 0 0 4px; color: var(--accent); font-size: 13px; font-weight: 600; }
.lead { margin: 0; max-width: 46em; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 0.92em; }
.note { list-style: none; margin: 18px 0 0; padding: 12px 18px; background: var(--note); border-radius: 4px;
  border-left: 4px solid var(--note-edge); font-size: 16px; }
.note li + li { margin-top: 8px; }
.fine { color: var(--soft); font-size: 13px; }
.lines { white-space: pre-line; margin-top: 8px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 14px 7px 0; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
thead th { color: var(--soft); font-weight: 500; font-size: 13px; vertical-align: bottom; line-height: 1.3; }
tbody th { font-weight: 400; }
td.wide { white-space: normal; min-width: 180px; }
.number { text-align: right; }
th:last-child, td:last-child { padding-right: 2px; }
td small { display: block; color: var(--soft); font-size: 12px; white-space: normal; }
.best > * { font-weight: 600; }
.sortable small { white-space: nowrap; font-weight: 400; }
.sortable { font-size: 13px; }
.sortable th, .sortable td { padding: 5px 10px 5px 0; }
.sortable thead th { white-space: normal; }
.sortable thead button { padding: 2px 0; min-height: 0; border: 0; background: none; color: inherit; border-radius: 3px;
  text-align: inherit; }
.sortable thead button::after { content: "↕"; opacity: 0.35; margin-left: 3px; }
.sortable [aria-sort="ascending"] button::after { content: "↑"; opacity: 1; }
.sortable [aria-sort="descending"] button::after { content: "↓"; opacity: 1; }
.sortable [aria-sort] button { color: var(--ink); }
.key { margin-right: 14px; color: var(--ink); }
.dot { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 8px; }
.models { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr)); gap: 10px 32px; }
.model { min-width: 0; }
.layers { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(380px, 100%), 1fr)); gap: 4px 32px; }
.layers.wide { grid-template-columns: repeat(auto-fit, minmax(min(560px, 100%), 1fr)); }
.layer { min-width: 0; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(400px, 100%), 1fr)); gap: 14px; }
.plot { margin: 0; height: 340px; min-width: 0; }
.scatter { height: 440px; border: 1px solid var(--line); border-radius: 6px; overflow: hidden; }
.holder { position: relative; }
.card { position: absolute; z-index: 5; margin: 0; padding: 9px 11px; width: max-content; font-size: 11.5px;
  line-height: 1.35; background: var(--panel); border: 1px solid var(--soft); border-radius: 6px; pointer-events: none;
  max-width: min(440px, calc(100vw - 16px)); white-space: pre-wrap; overflow: hidden; box-shadow: 0 3px 14px var(--shade); }
.card[hidden] { display: none; }
.chips { display: flex; flex-wrap: wrap; gap: 5px; margin-bottom: 8px; }
.chips button { padding: 2px 9px 2px 7px; min-height: 26px; font-size: 12.5px; background: none; }
.chips button[aria-pressed="true"] { background: var(--panel); border-color: var(--ink); border-style: solid; }
.chips button[aria-pressed="false"] { color: var(--ink); border-style: solid; }
.chips i { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 6px; }
.heat { width: 100%; font-size: 12px; }
.heat th, .heat td { padding: 0; border: 0; }
.heat td { height: 24px; min-width: 30px; padding: 0 2px; text-align: center; border: 1px solid var(--paper); }
.heat thead th { text-align: center; font-size: 12px; padding-bottom: 2px; white-space: normal; }
.heat thead .corner { text-align: right; padding-right: 8px; white-space: nowrap; font-size: 11px; }
.heat tbody th { padding-right: 8px; width: 1%; }
.heat.small { table-layout: fixed; }
.heat.small td { height: 15px; min-width: 0; padding: 0; border-width: 0 0 1px; }
.heat.small thead td { font-size: 11.5px; }
.heat.small thead td, .heat.small tbody th { width: min(var(--label), 50vw); overflow: hidden; text-overflow: ellipsis; }
.heat.small tbody th { font-size: 11.5px; line-height: 15px; }
.heat td.end { border-right: 4px solid var(--paper); }
.heat .plus { background: color-mix(in srgb, var(--plus) var(--v), var(--paper)); }
.heat .minus { background: color-mix(in srgb, var(--minus) var(--v), var(--paper)); }
.heat .share { background: color-mix(in srgb, var(--share) var(--v), var(--paper)); }
.heat .strong { color: var(--on-strong); }
.heat .none { color: var(--soft);
  background: repeating-linear-gradient(135deg, transparent 0 3px, var(--hatch) 3px 4px); }
.heat .own { outline: 1.5px solid var(--ink); outline-offset: -2px; }
.scale i { display: inline-block; width: 110px; height: 10px; vertical-align: -1px; margin: 0 4px; border-radius: 2px;
  background: linear-gradient(90deg, var(--minus), var(--paper), var(--plus)); border: 1px solid var(--line); }
.layer > .fine { margin: 2px 0 6px; }
.bars { width: 100%; max-width: 400px; display: block; margin: 4px 0; font-size: 10.5px; }
.bars text { fill: var(--ink); }
.bars .whisker { stroke: var(--ink); stroke-width: 1.4; }
a { color: var(--accent); }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: 12px 14px;
  white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 0 18px; }
.controls { display: grid; gap: 8px; margin-bottom: 10px; }
.controls > div { display: flex; flex-wrap: wrap; gap: 6px; align-items: center; }
.controls span { color: var(--soft); font-size: 13px; min-width: 60px; }
button { font: inherit; font-size: 13px; padding: 5px 11px; min-height: 32px; border-radius: 16px; cursor: pointer;
  color: var(--ink); border: 1px solid var(--line); background: var(--panel); }
.controls button[aria-pressed="true"] { border-color: var(--accent); box-shadow: inset 0 0 0 1px var(--accent); }
.controls button[aria-pressed="false"] { background: none; color: var(--soft); }
button:focus-visible, a:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
@media (max-width: 760px) {
  .scroll { background: linear-gradient(270deg, var(--paper) 40%, transparent) 100% 0 / 40px 100% no-repeat local,
    linear-gradient(270deg, var(--shade), transparent) 100% 0 / 14px 100% no-repeat scroll; }
  main { padding: 22px 16px 48px; }
  h1 { font-size: 25px; }
  .note { padding: 10px 14px; font-size: 15px; }
  .plot { height: 300px; } .scatter { height: 360px; }
  tbody th, thead th:first-child { position: sticky; left: 0; background: var(--paper); padding-right: 12px; z-index: 1; }
  .card { font-size: 10.5px; }
}
@media (max-width: 480px) { .heat { font-size: 10px; } .heat td { min-width: 26px; padding: 0 1px; } }
@media print { .controls, .chips { display: none; } main { max-width: none; } .layer { break-inside: avoid; } }
"""

_JS = """
(function () {
  "use strict";
  const data = JSON.parse(document.getElementById("page-data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const symbols = ["circle", "triangle-up", "square", "diamond"];
  const answers = { names: ["wrong", "correct"], colours: ["#D55E00", "#0072B2"] };
  const splitColours = ["#8787A5", "#D55E00", "#005AF0", "#4B8700"];
  const chosen = { layer: 0, colour: 0 };
  const picked = data.models.map(() => [new Set(), new Set(), new Set()]);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const options = { responsive: true, displaylogo: false, displayModeBar: coarse ? false : "hover",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };

  function base() {
    return { font: { family: getComputedStyle(document.body).fontFamily, color: css("ink") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
      dragmode: coarse ? false : "zoom", uirevision: "keep",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("soft"), activecolor: css("accent") },
      hoverlabel: { bgcolor: css("panel"), bordercolor: css("line"), font: { color: css("ink"), size: 13 } } };
  }

  // What the points of a model are coloured by: names, colours, and the number of each point's group.
  function colouring(model) {
    if (chosen.colour === 1) return { names: answers.names, colours: answers.colours, of: model.correct };
    if (chosen.colour === 2) return { names: model.splits, colours: splitColours, of: model.split };
    return { names: model.classes.map((name, i) => (i + 1) + " " + name), colours: model.colours, of: model.class };
  }

  function drawChips(model, m) {
    const by = colouring(model), place = document.getElementById("chips-" + m), mine = picked[m][chosen.colour];
    place.replaceChildren(...by.names.map((name, i) => {
      const chip = document.createElement("button"), dot = document.createElement("i");
      chip.type = "button";
      dot.style.background = by.colours[i % by.colours.length];
      chip.append(dot, name + " (" + by.of.filter((one) => one === i).length.toLocaleString("en") + ")");
      chip.setAttribute("aria-pressed", String(mine.has(i)));
      chip.addEventListener("click", () => {
        mine.has(i) ? mine.delete(i) : mine.add(i);
        drawModel(model, m);
        place.children[i].focus();
      });
      return chip;
    }));
  }

  function drawModel(model, m) {
    const place = document.getElementById("scatter-" + m), layer = model.layers[chosen.layer];
    hide(m);
    drawChips(model, m);
    document.getElementById("structure-" + m).textContent = layer ? layer.structure.join("\\n") : "no such layer";
    const by = colouring(model), mine = picked[m][chosen.colour];
    const shown = by.of.map((group) => mine.size === 0 || mine.has(group));
    const trace = { type: "scatter", mode: "markers", x: layer ? layer.x : [], y: layer ? layer.y : [],
      hoverinfo: "none",
      marker: { color: by.of.map((group) => by.colours[group % by.colours.length]),
        symbol: model.split.map((split) => symbols[split % 4]), size: model.split.map((split) => split ? 7.5 : 6),
        opacity: shown.map((one) => one ? 0.9 : 0.07),
        line: { width: 0.5, color: dark.matches ? "rgba(230,233,237,0.7)" : "#ffffff" } } };
    const axis = { showgrid: false, zeroline: false, showticklabels: false, ticks: "" };
    const numbers = [];
    (layer && chosen.colour === 0 ? layer.spots : []).forEach((spot, i) => {
      if (spot === null || (mine.size && !mine.has(i))) return;
      numbers.push({ x: spot[0], y: spot[1], text: "<b>" + (i + 1) + "</b>", showarrow: false, captureevents: false,
        font: { size: 12, color: css("ink") }, bgcolor: css("paper"), opacity: 0.85, borderpad: 1 });
    });
    const layout = Object.assign(base(), { margin: { l: 6, r: 6, t: 6, b: 6 }, xaxis: axis,
      yaxis: Object.assign({ scaleanchor: "x" }, axis), uirevision: chosen.layer, annotations: numbers });
    Plotly.react(place, [trace], layout, options);
    if (!place.dataset.ready) {
      place.dataset.ready = "yes";
      const show = (event) => reveal(model, m, event.points[0]);
      place.on("plotly_hover", show);
      place.on("plotly_click", show);
      place.on("plotly_unhover", () => hide(m));
      place.on("plotly_relayout", () => hide(m));
    }
  }

  const hide = (m) => { document.getElementById("card-" + m).hidden = true; };

  // The sequence of a point, as text (never as HTML), beside the point and inside the window.
  function reveal(model, m, point) {
    const card = document.getElementById("card-" + m), plot = document.getElementById("scatter-" + m);
    const i = point.pointNumber, right = document.documentElement.clientWidth - 8;
    const answer = model.correct[i] ? "correctly" : "wrongly";
    card.textContent = model.classes[model.class[i]] + ", answered " + answer + "\\n" +
      model.splits[model.split[i]] + ", task " + data.texts[model.task[i]] + "\\n\\n" + data.texts[model.text[i]].trimEnd();
    card.hidden = false;
    const x = point.xaxis.l2p(point.x) + point.xaxis._offset, y = point.yaxis.l2p(point.y) + point.yaxis._offset;
    const box = plot.getBoundingClientRect(), width = card.offsetWidth, height = card.offsetHeight;
    let left = x + 14;
    if (box.left + left + width > right) left = x - width - 14;
    left = Math.max(Math.min(left, right - box.left - width), 8 - box.left);
    let top = y + 14;
    if (box.top + top + height > window.innerHeight - 8) top = Math.max(y - height - 14, 8 - box.top);
    card.style.left = left + "px";
    card.style.top = top + "px";
  }

  function drawScores(panel, p) {
    const floor = (v) => v === null ? null : Math.max(v, data.lowest), list = [];
    let lowest = 0;
    const line = (extra) => Object.assign({ type: "scatter", mode: "lines", hoverinfo: "skip" }, extra);
    panel.series.forEach((one) => {
      const all = [...one.value, ...one.low, ...one.chance, ...one.control];
      lowest = Math.min(lowest, ...all.filter((v) => v !== null));
      const edges = { x: [], y: [] }, controls = { x: [], y: [] };
      one.x.forEach((x, i) => {
        if (one.chance[i] !== null) {
          edges.x.push(x - panel.step / 2, x + panel.step / 2, null);
          edges.y.push(floor(one.chance[i]), floor(one.chance[i]), null);
        }
        if (one.control[i] !== null && one.control_high[i] !== null) {
          controls.x.push(x + 0.3 * panel.step, x + 0.3 * panel.step, null);
          controls.y.push(floor(one.control[i]), floor(one.control_high[i]), null);
        }
      });
      list.push(line({ x: edges.x, y: edges.y, line: { color: css("soft"), width: 1.6 } }));
      list.push(line({ x: controls.x, y: controls.y, line: { color: one.colour, width: 1.2 } }));
      list.push(line({ mode: "markers", x: one.x.map((x) => x + 0.3 * panel.step), y: one.control.map(floor),
        marker: { symbol: "square-open", color: one.colour, size: 6 } }));
      const up = one.value.map((v, i) => one.high[i] === null || v < data.lowest ? 0 : one.high[i] - v);
      const down = one.value.map((v, i) => one.low[i] === null || v < data.lowest ? 0 : v - floor(one.low[i]));
      list.push({ type: "scatter", mode: "lines+markers", x: one.x, y: one.value.map(floor), name: one.name,
        line: { color: one.colour, width: 1.4 }, marker: { color: one.colour, size: 8,
          symbol: one.value.map((v) => v < data.lowest ? "triangle-down" : "circle") },
        error_y: { type: "data", symmetric: false, array: up, arrayminus: down, color: one.colour, thickness: 2,
          width: 0 },
        text: one.words, hovertemplate: "<b>" + one.name + "</b><br>%{text}<extra></extra>" });
    });
    const axis = { color: css("soft"), gridcolor: css("grid"), linecolor: css("line"), zeroline: false, automargin: true };
    const below = lowest < 0 ? Math.max(data.lowest - 0.06, lowest - 0.05) : -0.02;
    Plotly.react(document.getElementById("scores-" + p), list, Object.assign(base(), {
      margin: { l: 40, r: 10, t: 52, b: 34 },
      title: { text: panel.title + "<br><span style='font-size:12px'>" + panel.subtitle + "</span>", x: 0, xref: "paper",
        xanchor: "left", font: { size: 14, color: css("ink") } },
      xaxis: Object.assign({ tickvals: panel.titles.map((_, i) => i), ticktext: panel.titles, showgrid: false,
        showline: true, range: [-0.5, panel.titles.length - 0.5] }, axis),
      yaxis: Object.assign({ range: [below, 1.02] }, axis) }), Object.assign({}, options,
      { displayModeBar: false }));
  }

  function drawAll() {
    data.models.forEach(drawModel);
    data.panels.forEach(drawScores);
  }

  for (const name of ["layer", "colour"]) {
    const buttons = [...document.querySelectorAll("[data-" + name + "]")];
    chosen[name] = Math.max(0, buttons.findIndex((button) => button.getAttribute("aria-pressed") === "true"));
    buttons.forEach((button, i) => button.addEventListener("click", () => {
      chosen[name] = i;
      buttons.forEach((other, j) => other.setAttribute("aria-pressed", String(i === j)));
      data.models.forEach(drawModel);
    }));
  }

  document.querySelectorAll(".sortable").forEach((table) => {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const numeric = head.classList.contains("number"), before = head.getAttribute("aria-sort");
      const falling = before ? before === "ascending" : numeric;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.sort;
      const order = (a, b) => numeric ? Number(a) - Number(b) : a.localeCompare(b, "en", { numeric: true });
      [...body.rows].sort((a, b) => (key(a) === "") - (key(b) === "") ||
        (key(a) === "" ? 0 : order(key(a), key(b)) * (falling ? -1 : 1))).forEach((row) => body.append(row));
    }));
  });
  dark.addEventListener("change", drawAll);
  drawAll();
})();
"""
