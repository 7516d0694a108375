"""Modules as files: ONNX, packages of AOTInductor, and programs of torch.export."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dfwlayer.arguments import shown

__all__ = ["FORMATS", "Call", "format_of", "load", "write"]

FORMATS = ("onnx", "aoti", "export")
INSTALL = "pip install 'dfwlayer[export]'"
SPECTRAL = ("linalg_svd", "linalg_eigh")  # operators
# what third parties say about themselves while they export
NOISE = (
    r".*treespec, LeafSpec.*is deprecated.*",  # torch on its own trees
    r".*axis name: .* will not be used.*",  # torch.onnx on a batch that several inputs share
    # torch.export of PyTorch 2.6 on tensors that it has made attributes itself
    r"Attempted to insert a get_attr Node",
    r"Node \S*lifted_tensor_",
    r"Additional \d+ warnings suppressed about get_attr",
)


class Call(NamedTuple):
    """The arguments of a module, by position and by name; tensors, numbers and None."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, inputs: Any) -> Call:
        """From a tensor, a tuple, a dict of keywords, or both."""
        if isinstance(inputs, Call):
            return inputs
        if isinstance(inputs, dict):
            return cls((), inputs)
        return cls(inputs, {}) if isinstance(inputs, tuple) else cls((inputs,), {})

    @property
    def tensors(self) -> list[Tensor]:
        """Those of the arguments that are."""
        given = (*self.args, *self.kwargs.values())
        return [value for value in given if isinstance(value, Tensor)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Call:
        """The same with others in their places."""
        left = iter(tensors)
        args, kwargs = (
            [next(left) if isinstance(v, Tensor) else v for v in part]
            for part in (self.args, self.kwargs.values())
        )
        return Call(tuple(args), dict(zip(self.kwargs, kwargs, strict=True)))

    def names(self, model: nn.Module) -> list[str]:
        """A name for each tensor."""
        found: list[str] = []
        given = inspect.signature(model.forward).bind(*self.args, **self.kwargs).arguments
        for name, value in given.items():
            if isinstance(value, tuple):  # of parameters that stand for any number
                known = getattr(model, "positional", [f"{name}{i}" for i in range(len(value))])
                pairs = list(zip(known[-len(value) :], value, strict=True))
            elif isinstance(value, dict):
                pairs = list(value.items())
            else:
                pairs = [(name, value)]
            found += [own for own, each in pairs if isinstance(each, Tensor)]
        return found


def format_of(path: Path, wanted: str | None) -> str:
    """The format, which the end of the name tells where it is not said."""
    found = wanted or {".onnx": "onnx", ".pt2": "aoti"}.get(path.suffix)
    if found not in FORMATS:
        raise ValueError(
            f"format: expected one of {list(FORMATS)}, or a path that ends in .onnx or .pt2 "
            f"(for aoti), got {shown(wanted)} and {path.name}"
        )
    return found


def write(model: nn.Module, call: Call, batched: Sequence[bool], path: Path, kind: str) -> None:
    """Write a module to a file, as a function of the tensors in its call, in their order.

    ``batched`` says which of them have the batch in front.
    """
    taken = _Tensors(model, call)
    batch = torch.export.Dim("batch")
    shapes = (tuple({0: batch} if some else None for some in batched),) if any(batched) else None
    with _quiet():
        exported = torch.export.export(
            taken,
            tuple(call.tensors),
            dynamic_shapes=shapes,
            strict=False,  # the default since PyTorch 2.7
        )
        if kind == "export":
            torch.export.save(exported, path)
        elif kind == "aoti":
            torch._inductor.aoti_compile_and_package(exported, package_path=str(path))
        else:
            _write_onnx(exported, call.names(model), path)


def _write_onnx(exported: torch.export.ExportedProgram, names: list[str], path: Path) -> None:
    _need_onnx()
    called = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    if any(name in target for target in called for name in SPECTRAL):
        raise ValueError(
            "format: ONNX has no operator for singular values or eigenvalues, which the projection "
            "onto a set of matrices needs; 'aoti' and 'export' have"
        )
    output = "x"
    while output in names:  # many call the argument of forward so
        output += "_out"
    program = torch.onnx.export(
        exported,
        dynamo=True,
        verbose=False,
        input_names=names,
        output_names=[output],
    )
    assert program is not None
    program.save(path)


def load(path: Path, kind: str) -> Callable[[Call], Tensor]:
    """A file as a function of what the module was called with."""
    if kind == "onnx":
        return _session(path)
    model: Callable[..., Tensor]
    if kind == "aoti":
        model = torch._inductor.aoti_load_package(str(path))
    else:
        model = torch.export.load(path).module()
    return lambda call: model(*call.tensors)


def _session(path: Path) -> Callable[[Call], Tensor]:
    """By onnxruntime with one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def run(call: Call) -> Tensor:
        feed = {k: v.numpy() for k, v in zip(names, call.tensors, strict=True)}
        return torch.from_numpy(session.run(None, feed)[0])

    return run


class _Tensors(nn.Module):
    """A module as a function of the tensors in its call; the rest of the call is constant."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model, self.call = model, call.with_tensors([torch.empty(0)] * len(call.tensors))
        self.eval()

    def forward(self, *tensors: Tensor) -> Tensor:
        call = self.call.with_tensors(tensors)
        x: Tensor = self.model(*call.args, **call.kwargs)
        return x


def _need_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(f"ONNX files need {error.name}; {INSTALL}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of exporters about themselves."""
    registry = logging.getLogger("torch.onnx._internal.exporter._registration")
    before = registry.level
    registry.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        for text in NOISE:
            warnings.filterwarnings("ignore", message=text)
        try:
            yield
        finally:
            registry.setLevel(before)
