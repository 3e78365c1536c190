"""Names that a template expects to be given: those that it may read before it has set them itself.

Jinja's own function also returns names that all branches set before anything reads them.
"""

from __future__ import annotations

from collections.abc import Iterable

import jinja2.meta
import jinja2.nodes
import jinja2.visitor


def expected_names(template: jinja2.nodes.Template) -> frozenset[str]:
    """Return the names that a template expects to be given. A name counts as expected where that cannot be decided."""
    reads = _VariableReads()
    reads.visit(template)
    return frozenset(reads.found & jinja2.meta.find_undeclared_variables(template))


class _VariableReads(jinja2.visitor.NodeVisitor):
    """Visitor that collects, in `found`, names that are read where they may not have been set."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._set: frozenset[str] | None = frozenset()  # names surely set by now; None: rendering never comes here

    def visit_Name(self, node: jinja2.nodes.Name) -> None:
        if node.ctx != "load":
            self._store(node.name)
        elif self._set is not None and node.name not in self._set:
            self.found.add(node.name)

    def visit_NSRef(self, node: jinja2.nodes.NSRef) -> None:
        self.visit_Name(jinja2.nodes.Name(node.name, "load"))

    def visit_Assign(self, node: jinja2.nodes.Assign) -> None:
        self._all((node.node, node.target))

    def visit_AssignBlock(self, node: jinja2.nodes.AssignBlock) -> None:
        if node.filter is not None:
            self.visit(node.filter)
        self._inside(node.body)
        self.visit(node.target)

    def visit_Output(self, node: jinja2.nodes.Output) -> None:
        for part in node.nodes:
            self.visit(part)
            called = part.node if isinstance(part, jinja2.nodes.Call) else None
            if isinstance(called, jinja2.nodes.Name) and called.name == "raise_exception":
                self._set = None

    def visit_Continue(self, node: jinja2.nodes.Continue) -> None:
        self._set = None

    def visit_Break(self, node: jinja2.nodes.Break) -> None:
        self._set = None

    def visit_If(self, node: jinja2.nodes.If) -> None:
        ends = []
        for branch in (node, *node.elif_):
            self.visit(branch.test)
            before = self._set
            self._all(branch.body)
            ends.append(self._set)
            self._set = before
        self._all(node.else_)
        ended = [names for names in (*ends, self._set) if names is not None]
        self._set = frozenset.intersection(*ended) if ended else None

    # A name that is set inside one of the following nodes is not set behind it.

    def visit_For(self, node: jinja2.nodes.For) -> None:
        self.visit(node.iter)
        self._inside((node.target, *([node.test] if node.test is not None else []), *node.body))
        self._inside(node.else_)

    def visit_With(self, node: jinja2.nodes.With) -> None:
        self._inside((*node.values, *node.targets, *node.body))

    def visit_Macro(self, node: jinja2.nodes.Macro) -> None:
        self._inside((*node.defaults, *node.args, *node.body))
        self._store(node.name)

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> None:
        self.visit(node.call)
        self._inside((*node.defaults, *node.args, *node.body))

    def visit_FilterBlock(self, node: jinja2.nodes.FilterBlock) -> None:
        self.visit(node.filter)
        self._inside(node.body)

    def visit_Block(self, node: jinja2.nodes.Block) -> None:
        before, self._set = self._set, frozenset()
        self._all(node.body)
        self._set = before

    def _inside(self, nodes: Iterable[jinja2.nodes.Node]) -> None:
        before = self._set
        self._all(nodes)
        self._set = before

    def _all(self, nodes: Iterable[jinja2.nodes.Node]) -> None:
        for node in nodes:
            self.visit(node)

    def _store(self, name: str) -> None:
        if self._set is not None:
            self._set |= {name}
