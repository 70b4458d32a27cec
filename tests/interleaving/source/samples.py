"""Functions and modules whose insides are looked into."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch


def double(x: Any) -> Any:
    return x + x


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return 10 * function(*args, **kwargs)

    return wrapper


class Registered:
    """A decorator that is no function."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def make(factor: int) -> Callable[..., Any]:
    def closure(x: Any, *, plus: int = 1) -> Any:
        return double(x) * factor + plus

    return closure


class Base:
    def value(self, x: Any) -> Any:
        return x + 1


class Derived(Base):
    __secret = 5

    def value(self, x: Any, y: int = 2) -> Any:
        return super().value(double(x)) + self.__secret + y

    @decorated
    def wrapped(self, x: Any) -> Any:
        return double(x)

    def fails(self, x: Any) -> Any:
        y = double(x)
        return self.raises(y)

    def raises(self, x: Any) -> Any:
        raise RuntimeError(x)

    def loops(self, x: Any) -> Any:
        return [double(value) for value in range(x)]

    def knows_its_frame(self, x: Any) -> Any:
        return sorted(locals())


class Generates(torch.nn.Module):
    def forward(self, x: Any) -> Iterator[Any]:
        yield x


class Awaits(torch.nn.Module):
    async def forward(self, x: Any) -> Any:
        return x


class Partial(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.forward = functools.partial(self.work, 3)

    def work(self, factor: int, x: Any) -> Any:
        return double(x) * factor


class NotPython(torch.nn.Module):
    forward = torch.relu


class Decorated(torch.nn.Module):
    @torch.no_grad()
    def forward(self, x: Any) -> Any:
        return double(x)


class Hidden(torch.nn.Module):
    forward = Registered(double)  # type: ignore[assignment]


class Lambda(torch.nn.Module):
    forward = lambda self, x: double(x)  # type: ignore[assignment]  # noqa: E731


class Named:
    def named(self) -> Any:
        return isinstance(self, int) or Named


def recursive(x: int) -> int:
    return recursive(x - 1) + 1 if x else 0


def make_class(factor: int) -> Any:
    class Local:
        def value(self, x: Any) -> Any:
            return double(x) * factor, Local.__name__

    return Local()
