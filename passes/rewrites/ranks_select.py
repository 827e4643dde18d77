"""Reading a rank's rows of a tensor instead of all of them."""

from __future__ import annotations

import torch
from torch import fx

from h3compile.program.edit import Editor

__all__ = ["select"]

aten = torch.ops.aten


def select(edit: Editor, node: fx.Node, dim: int, index: fx.Node, keep: fx.Node | None = None) -> None:
    """Have all readers of the input ``node`` but ``keep`` read its elements ``index`` along ``dim``.

    Those that ask how many there are are told how many these are.
    """
    first = next(edit.nodes())
    for user in list(node.users):
        if user is not keep and user.target is aten.sym_size.int and user.args[1] == dim:
            user.args = (index, 0)
    reader = next((user for user in node.users if user is not keep), None)
    if reader is not None:
        chosen = edit.add(first, aten.index_select.default, node, dim, index, name="local", origin=reader)
        node.replace_all_uses_with(chosen, delete_user_cb=lambda user: user not in (chosen, keep))
