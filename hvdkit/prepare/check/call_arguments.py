"""Which argument of a call fills which parameter of a function."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from hvdkit.prepare.check.program import FunctionNode


def arguments(call: ast.Call) -> list[ast.expr]:
    """All arguments of a call."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def element(whole: ast.expr, index: tuple[int, ...]) -> ast.expr:
    """The element of a tuple of tuples; the whole where the text does not show its elements."""
    for position in index:
        inside = isinstance(whole, (ast.Tuple, ast.List)) and position < len(whole.elts)
        if not inside or any(isinstance(one, ast.Starred) for one in whole.elts):  # type: ignore[attr-defined]
            return whole
        whole = whole.elts[position]  # type: ignore[attr-defined]
    return whole


def default_of(arguments: ast.arguments, parameter: ast.arg) -> ast.expr | None:
    """The default of a parameter; None where it has none."""
    positional = [*arguments.posonlyargs, *arguments.args]
    if parameter in positional:
        place = positional.index(parameter) - (len(positional) - len(arguments.defaults))
        return arguments.defaults[place] if place >= 0 else None
    if parameter in arguments.kwonlyargs:
        return arguments.kw_defaults[arguments.kwonlyargs.index(parameter)]
    return None


def given_for(
    function: FunctionNode, parameter: ast.arg, values: Sequence[ast.expr], call: ast.Call | None
) -> list[ast.expr]:
    """What is given for one parameter; everything that could be it where the call uses ``*`` or ``**``.

    Args:
        values: the positional arguments.
        call: where keywords are looked for; None where there are none.
    """
    positional = [*function.args.posonlyargs, *function.args.args]
    bound = bool(positional) and positional[0].arg in ("self", "cls")
    keywords = call.keywords if call is not None else []
    named = [keyword.value for keyword in keywords if keyword.arg == parameter.arg]
    if named:
        return named
    spread = [keyword.value for keyword in keywords if keyword.arg is None]
    if parameter is function.args.vararg:
        return list(values[len(positional) - bound :])
    if parameter is function.args.kwarg:
        known = {one.arg for one in positional + function.args.kwonlyargs}
        return [keyword.value for keyword in keywords if keyword.arg not in known]
    if parameter not in positional:
        return spread
    place = positional.index(parameter) - bound
    stars = [i for i, value in enumerate(values) if isinstance(value, ast.Starred)]
    if stars and place >= stars[0]:
        return [*values[stars[0] :], *spread]
    return [values[place]] if 0 <= place < len(values) else spread
