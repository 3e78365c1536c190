"""HTML page of a profile that needs no other file, with a bar for each module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from ..layer_folding import fold_layers
from ..module_tree import LayerSpread, ModuleNode
from ..profiler import Profile, ProfilePhase
from .page_style import PAGE_STYLE
from .text_report import LEGEND, describe_machine_load, format_amount, phase_headline

_KINDS = {
    "linear": "linear layers",
    "attention": "attention",
    "norm": "norms",
    "rotary": "rotary",
    "activation": "activation",
    "lookup": "tables",
    "outside": "outside modules",
}
_COLUMNS = ("module", "share of the step", "ms", "%", "bytes", "FLOPs", "of roofline", "kernel", "layer by layer")


def render_page(profile: Profile) -> str:
    about = profile.about
    said = [about["family"], f"{about['layers']} layers", about["quantization"]]
    said.append(f"{about['activations']} on {about['device']}")
    said += [f"{about['threads']} threads"] if "threads" in about else []
    body = "".join((
        f"<header><p class=brand>motley profile</p><h1>{escape(about['model'])}</h1>",
        f"<p class=sub>{escape(' · '.join(said))}</p></header>",
        _ceiling(profile),
        *(f"<p class=busy>{escape(each)}</p>" for each in describe_machine_load()),
        *(_phase(phase) for phase in profile.phases),
        _choices(profile),
        f"<footer>{escape(LEGEND)}</footer>",
    ))  # fmt: skip
    title = escape(f"Profile of {about['model']}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{PAGE_STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def _ceiling(profile: Profile) -> str:
    ceiling = profile.ceiling
    figures = {
        "bandwidth": (ceiling.bandwidth, "B/s"),
        **{name: (each, "FLOP/s") for name, each in ceiling.rates.items()},
    }
    cards = "".join(
        f"<div class=card title='{escape(each.how, quote=True)}'><b>{format_amount(each.value)}{unit}</b>"
        f"<span>{escape(name)}</span><em class={each.source}>{each.source}</em></div>"
        for name, (each, unit) in figures.items()
    )
    return f"<section><h2>Roofline of {escape(ceiling.name)}</h2><div class=cards>{cards}</div></section>"


def _phase(phase: ProfilePhase) -> str:
    step = fold_layers(phase.step)
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    off = frozenset(path for found in phase.findings for path in found.paths)
    rows = "".join(_row(node, depth, step.seconds, off) for node, depth in _walk(step))
    name, _, rest = phase_headline(phase).partition(" ")
    keys = "".join(f"<span class='key {kind}'>{name}</span>" for kind, name in _KINDS.items())
    return (
        f"<section><h2>{name.capitalize()}</h2><p class=sub>{escape(rest)}</p>{_findings(phase)}"
        f"<p class=keys>{keys}<span class='key full'>full: what the roofline needs; pale: the rest</span></p>"
        f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _row(node: ModuleNode, depth: int, step_s: float, off: frozenset[str]) -> str:
    """Return a row of the table. off: paths of modules that findings name."""
    share, facts, reached = node.seconds / step_s, node.facts, node.reached
    kind = facts.kind if facts else "group" if node.children else "outside"
    cells = (
        f"<th style='--depth:{depth}'>{escape(node.name)}</th>",
        f"<td class=bar>{_bar(kind, share, reached)}</td>",
        f"<td>{1e3 * node.seconds:.3f}</td><td>{share:.1%}</td>",
        f"<td>{format_amount(node.work.moved) if node.work.moved else ''}</td>",
        f"<td>{format_amount(node.work.operations) if node.work.operations else ''}</td>",
        f"<td>{'' if reached is None else f'{reached:.0%}'}</td>",
        f"<td class=kernel>{escape(facts.kernel) if facts else ''}</td>",
        f"<td class=layers>{_layers(node.spread) if node.spread else ''}</td>",
    )
    named = " off" if facts and not off.isdisjoint(_paths(node)) else ""
    return f"<tr class='{kind}{named}'>{''.join(cells)}</tr>"


def _paths(node: ModuleNode) -> list[str]:
    """Return the paths of a node in all layers that it stands for."""
    if node.spread is None:
        return [node.path]
    role = node.path.split(".", 2)[2]
    return [f"layers.{number}.{role}" for number in node.spread.layers]


def _bar(kind: str, share: float, reached: float | None) -> str:
    """Return a bar as long as the node's share of the step; the part that the roofline needs is in full colour."""
    width = 100 * max(0.0, min(1.0, share))
    needed = 100 * min(1.0, reached or 0.0)
    return f"<i class={kind} style='width:{width:.2f}%'><i style='width:{needed:.1f}%'></i></i>"


def _layers(spread: LayerSpread) -> str:
    """Return a column for each layer, whose height is its time relative to the slowest."""
    slowest_s = spread.slowest_s or 1.0
    columns = "".join(
        f"<i style='height:{100 * seconds / slowest_s:.0f}%' title='layer {layer}: {1e3 * seconds:.3f} ms'></i>"
        for layer, seconds in zip(spread.layers, spread.each_s, strict=True)
    )
    return f"<span class=columns>{columns}</span>{1e3 * spread.fastest_s:.3f} – {1e3 * spread.slowest_s:.3f}"


def _findings(phase: ProfilePhase) -> str:
    if not phase.findings:
        return "<p class=fine>No module is far off its siblings, and none far from the roofline for a known cause.</p>"
    return "".join(
        f"<div class=finding><b>{escape(found.text)}</b>"
        f"{_terms({'likely cause': found.cause, 'chosen': found.chosen, 'remedy': found.remedy})}</div>"
        for found in phase.findings
    )


def _terms(said: Mapping[str, str]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(what)}</dt><dd>{escape(why)}</dd>' for what, why in said.items() if why)}</dl>"


def _choices(profile: Profile) -> str:
    return f"<section><h2>What was chosen, and why</h2>{_terms(profile.choices)}</section>"


def _walk(node: ModuleNode, depth: int = 0) -> Iterator[tuple[ModuleNode, int]]:
    yield node, depth
    for child in node.children:
        yield from _walk(child, depth + 1)
