"""A report as data and as HTML: one file, which loads nothing and is forbidden to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

import numpy as np

from vllm_weir.analysis.feature_report.statistics import BINS, FeatureTotals, LogitEffects
from vllm_weir.storage.features.dataset import FeatureInfo
from vllm_weir.util.token_texts import TokenTexts


@dataclass(frozen=True)
class ContextToken:
    """A token of a context, and the activation of the context's feature on it."""

    text: str
    token_id: int
    position: int
    value: float


@dataclass(frozen=True)
class FeatureContext:
    """Tokens around the one on which a feature is most active in a record."""

    record: int  # the record
    value: float  # the feature's largest activation there
    tokens: tuple[ContextToken, ...]  # neighbouring rows of the record
    cut: tuple[bool, bool]  # whether the record has rows before these, and after these


@dataclass(frozen=True, eq=False)
class FeatureReport:
    """What a page shows of a feature."""

    feature: int  # its number
    density: float  # share of the rows on which it is active
    active: int  # number of these rows
    largest: float  # its largest activation
    mean: float  # its mean activation where it is active
    histogram: np.ndarray  # rows by activation, in bins of equal width from 0 to `largest`
    contexts: tuple[FeatureContext, ...]  # of the records in which it is most active
    effects: LogitEffects | None  # the tokens whose logits it changes most; None if not known


@dataclass(frozen=True, eq=False)
class SAEReport:
    """All that a page shows."""

    info: FeatureInfo  # which autoencoder, and which of its features the dataset holds
    records: int  # number of records of the dataset
    totals: FeatureTotals  # counts over all its rows
    features: tuple[FeatureReport, ...]  # the chosen features
    texts: TokenTexts  # texts of tokens
    notes: tuple[str, ...]  # sentences on what is left out, and why


POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
COLUMNS = (
    ("feature", "Feature"),
    ("density", "Density"),
    ("max", "Max activation"),
    ("mean", "Mean when active"),
)
MAX_WORD = 24
"""Characters of a token in lists of tokens."""
_VISIBLE = str.maketrans({"\n": "↵", "\t": "⇥", "\r": "␍"})


def render(report: SAEReport) -> str:
    """Return the page."""
    title = f"{report.info.sae} at {report.info.site}"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>Features of {escape(title)}</title>
<style>
{_file("page.css")}</style>
</head>
<body>
{_header(report, title)}
<main>
<h2>Features</h2>
{_index(report)}
<h2>How often features are active</h2>
{_densities(report)}
<h2>Feature by feature</h2>
<div id="features">
{"".join(_feature(one, report.texts) for one in report.features)}</div>
</main>
<footer>Activations are on the rows of the dataset. A context is the part of a record around the token on which the
feature is most active; the brighter a token, the closer its activation to the feature's largest.</footer>
<script>
{_file("page.js")}</script>
</body>
</html>
"""


def _file(name: str) -> str:
    return files("vllm_weir.analysis.feature_report").joinpath(name).read_text("utf-8")


def _header(report: SAEReport, title: str) -> str:
    info, totals = report.info, report.totals
    extracted = np.arange(info.d_sae) if info.ids is None else np.array(info.ids)
    never = int((totals.active[extracted] == 0).sum())
    facts = {
        "Architecture": str(info.cfg.get("architecture", "")),
        "Features": f"{info.d_sae:,}",
        "Records": f"{report.records:,}",
        "Tokens": f"{totals.rows:,}",
        "Active on a token": f"{totals.active.sum() / max(totals.rows, 1):.1f}",
        "Never active": f"{never:,}",
    }
    listed = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    notes = [*report.notes]
    if info.ids is not None:
        notes.append(f"{len(info.ids):,} chosen features were extracted; nothing is known of the others.")
    if totals.full_rows:
        share = totals.full_rows / totals.rows
        notes.append(
            f"{totals.full_rows:,} tokens ({share:.2%}) have {info.top_k} active features, as many as were "
            "extracted, and may have more: densities are lower bounds. Extract with a larger --top-k."
        )
    said = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    return (
        f"<header><h1>{escape(title)}</h1>"
        f'<p class="what">Features of a sparse autoencoder of {escape(info.model)}</p>'
        f'<dl class="facts">{listed}</dl>{said}</header>'
    )


def _index(report: SAEReport) -> str:
    most = max((one.density for one in report.features), default=0.0) or 1.0
    heads = "".join(f'<th><button data-by="{key}">{escape(name)}</button></th>' for key, name in COLUMNS)
    rows = []
    for one in report.features:
        bar = f'<span class="bar" style="width:{4 * one.density / most:.2f}rem"></span>'
        rows.append(
            f'<tr data-feature="{one.feature}" data-density="{one.density:.9g}" data-max="{one.largest:.9g}" '
            f'data-mean="{one.mean:.9g}"><td><a href="#feature-{one.feature}">{one.feature}</a></td>'
            f"<td>{bar}{_percent(one.density)}</td><td>{one.largest:.2f}</td><td>{one.mean:.2f}</td>"
            f'<td class="words">{_peak_words(one.contexts)}</td></tr>'
        )
    return (
        f'<div class="scroll"><table id="index"><thead><tr>{heads}<th class="words">Most active on</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _peak_words(contexts: Sequence[FeatureContext]) -> str:
    words = (_word(max(context.tokens, key=lambda token: token.value).text.strip(" ")) for context in contexts)
    return "  ".join(dict.fromkeys(words))


def _densities(report: SAEReport) -> str:
    """Return a histogram over all features of log10 of the density."""
    density = report.totals.density
    logs = np.log10(density[density > 0])
    if not len(logs):
        return "<p>No feature is active.</p>"
    low = float(np.floor(logs.min()))
    counts, _ = np.histogram(logs, bins=BINS, range=(min(low, -1.0), 0.0))
    left = _percent(10 ** min(low, -1.0))
    return f'<div class="feature">{_bars(counts, left, "100% of tokens", "features", height=70, width=900)}</div>'


def _feature(one: FeatureReport, texts: TokenTexts) -> str:
    contexts = "".join(_context(context, one.largest) for context in one.contexts)
    contexts = f'<ol class="contexts">{contexts}</ol>' if contexts else "<p>It is never active.</p>"
    bars = _bars(one.histogram, "0", f"{one.largest:.2f}", "tokens") if one.active else ""
    return (
        f'<section class="feature" id="feature-{one.feature}"><div class="head">'
        f'<h2><a href="#feature-{one.feature}">Feature {one.feature}</a></h2>'
        f"<span>active on <b>{_percent(one.density)}</b> of tokens ({one.active:,})</span>"
        f"<span>max <b>{one.largest:.2f}</b></span><span>mean when active <b>{one.mean:.2f}</b></span></div>"
        f'<div class="body"><div><h3>Activations</h3>{bars}{_effects(one, texts)}</div>'
        f"<div><h3>Contexts with the largest activations</h3>{contexts}</div></div></section>\n"
    )


def _effects(one: FeatureReport, texts: TokenTexts) -> str:
    if one.effects is None:
        return ""
    columns = []
    for kind, name, tokens in (
        ("up", "Logits raised", one.effects.raised),
        ("down", "Logits lowered", one.effects.lowered),
    ):
        items = "".join(
            f'<li title="token {token}"><code>{_word(texts.single(token))}</code><span>{value:+.2f}</span></li>'
            for token, value in tokens
        )
        columns.append(f'<div class="{kind}"><h3>{name}</h3><ol>{items}</ol></div>')
    return f'<div class="effects">{"".join(columns)}</div>'


def _context(context: FeatureContext, largest: float) -> str:
    peak = max(range(len(context.tokens)), key=lambda i: context.tokens[i].value)
    before, after = ("<i>… </i>" if cut else "" for cut in context.cut)
    text = "".join(_token(token, largest, i == peak) for i, token in enumerate(context.tokens))
    return (
        f'<li><div class="value">{context.value:.2f}<small>#{context.record}</small></div>'
        f'<div class="text">{before}{text}{after}</div></li>'
    )


def _token(token: ContextToken, largest: float, is_peak: bool) -> str:
    text = escape(token.text.replace("\n", "↵\n"))
    title = f"{token.value:.3f} · position {token.position} · token {token.token_id}"
    if token.value == 0:
        return f'<span title="{title}">{text}</span>'
    share = min(token.value / largest, 1.0) if largest else 0.0
    kind = "t peak" if is_peak else "t"
    return f'<span class="{kind}" style="--a:{share:.3f}" title="{title}">{text}</span>'


def _bars(counts: np.ndarray, left: str, right: str, unit: str, height: int = 90, width: int = 320) -> str:
    """Return a histogram as SVG, with the largest count and both ends of the axis."""
    most = max(int(counts.max()), 1)
    step = width / len(counts)
    bars = "".join(
        f'<rect x="{i * step + 0.5:.1f}" y="{14 + height - size:.1f}" width="{step - 1:.1f}" height="{size:.1f}">'
        f"<title>{count:,} {escape(unit)}</title></rect>"
        for i, count in enumerate(counts.tolist())
        if (size := max(height * count / most, 1.0 if count else 0.0))
    )
    base = 14 + height
    return (
        f'<svg viewBox="0 0 {width} {height + 30}" role="img" aria-label="histogram, at most {most:,} {escape(unit)} a '
        f'bin">{bars}<line x1="0" x2="{width}" y1="{base}" y2="{base}"/><text x="0" y="10">{most:,} {escape(unit)}'
        f'</text><text x="0" y="{base + 13}">{escape(left)}</text>'
        f'<text x="{width}" y="{base + 13}" text-anchor="end">{escape(right)}</text></svg>'
    )


def _word(text: str) -> str:
    """Return a token's text for a list: on one line, with its spaces to be seen."""
    shown = text.translate(_VISIBLE)
    if shown.strip() == "":
        shown = shown.replace(" ", "␣") or "(empty)"
    return escape(shown if len(shown) <= MAX_WORD else f"{shown[: MAX_WORD - 1]}…")


def _percent(share: float) -> str:
    return "0%" if share == 0 else f"{100 * share:.2f}%" if share >= 0.001 else f"{100 * share:.2g}%"
