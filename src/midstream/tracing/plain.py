"""Blocks that can be seen to do nothing but compute on what they are given.

They change no mode, stream or generator of the thread and print nothing, so that who runs them
need not exchange any of it around them. Whatever is not known is taken to do all of that.
"""

from __future__ import annotations

import ast

__all__ = ["is_plain"]

_SYNTAX = (
    *(ast.Module, ast.Expr, ast.Pass, ast.If, ast.IfExp, ast.For, ast.While, ast.Break),
    *(ast.Continue, ast.Assign, ast.AugAssign, ast.Name, ast.Attribute, ast.Subscript, ast.Slice),
    *(ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.BinOp, ast.UnaryOp, ast.BoolOp),
    *(ast.Compare, ast.Call, ast.keyword),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.comprehension),
    *(ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
_FUNCTION_NAMES = """
abs bool dict enumerate float int len list max min range reversed round sum tuple zip
"""
_METHOD_NAMES = """
append extend items keys values get save stop skip cache
clone detach contiguous to cpu cuda float half bfloat16 double long int bool item tolist
view reshape flatten squeeze unsqueeze transpose permute expand repeat chunk split unbind
size dim numel mean sum std var norm max min amax amin argmax argmin topk sort cumsum
softmax log_softmax sigmoid tanh relu exp log abs square sqrt rsqrt pow clamp neg
matmul mm bmm dot outer einsum where gather index_select masked_fill cosine_similarity
add_ sub_ mul_ div_ neg_ copy_ zero_ fill_ clamp_ masked_fill_ index_copy_ index_fill_
stack cat zeros ones full arange tensor zeros_like ones_like full_like
"""
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
_METHODS = frozenset(_METHOD_NAMES.split())
_ASSIGNED = frozenset(("output", "input", "inputs", "samples", "logits"))


def is_plain(tree: ast.AST) -> bool:
    """Whether code that is given plain values only calls what is known to compute."""
    nodes = list(ast.walk(tree))
    bound = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return bound.isdisjoint(_FUNCTIONS | {"torch"}) and all(map(_is_known, nodes))


def _is_known(node: ast.AST) -> bool:
    if not isinstance(node, _SYNTAX):
        return False
    if isinstance(node, ast.Attribute):
        read = isinstance(node.ctx, ast.Load) and not node.attr.startswith("_")
        return read or (isinstance(node.ctx, ast.Store) and node.attr in _ASSIGNED)
    if isinstance(node, ast.keyword):  # `key=torch.manual_seed` is a call; `**` may hold one
        return node.arg not in (None, "key")
    if not isinstance(node, ast.Call):
        return True
    called = node.func
    if isinstance(called, ast.Attribute):
        return called.attr in _METHODS
    return isinstance(called, ast.Name) and called.id in _FUNCTIONS
