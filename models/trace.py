"""Tracing: from Diffusers' H3 class to a program of one region, without a single real weight."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind

from h3compile.errors import BuildError
from h3compile.models.h3 import LABELS, Config, facts_for, release_dtype
from h3compile.program.cut import returned
from h3compile.program.facts import ModelFacts
from h3compile.program.program import Call, Level, Program
from h3compile.program.region import Port, Region
from h3compile.program.weights import Literal, Load, Weight

__all__ = ["parameter_shapes", "trace"]

# Sizes used while tracing. All differ and none is 0 or 1, so that no length is taken for another or
# for a broadcast; they have no influence on the graph.
_SIZES = {"video_rows": 34, "audio_rows": 22, "text_rows": 6, "rows": 62, "timesteps": 3}


def _instantiate(config: Config) -> torch.nn.Module:
    from diffusers import MiniMaxH3Transformer3DModel

    return MiniMaxH3Transformer3DModel(**config).eval().requires_grad_(False)  # type: ignore[no-any-return]


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight an H3 of this configuration loads."""
    with torch.device("meta"):
        model = _instantiate(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def trace(config: Config, dtypes: Mapping[str, torch.dtype] | None = None) -> Program:
    """The program of an H3 of this configuration: one region, every length symbolic.

    ``dtypes`` gives the stored dtype of every weight; without it, the release's mix. Everything runs on
    fake tensors, so memory does not grow with the model. Raises `BuildError` when Diffusers' class cannot
    be exported with free lengths.
    """
    shapes = parameter_shapes(config)
    dtypes = dtypes if dtypes is not None else {name: release_dtype(name) for name in shapes}
    facts = facts_for(config, dtypes)
    exported = _export(config, dtypes, facts)
    computed = _computed_buffers(config)

    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    kinds = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    by_input = {node.name: node for node in placeholders if kinds[node.name].kind is InputKind.USER_INPUT}
    for fact in facts.inputs:
        nodes[by_input[fact.name]] = graph.placeholder(fact.name)

    ports: list[Port] = []
    weights: dict[str, Weight] = {}
    for node in placeholders:
        target = kinds[node.name].target
        if target is None or not node.users:
            continue
        weight: Weight
        if target in computed:
            weight = Literal.of(computed[target])
        else:
            weight = Load(target, shapes[target], dtypes[target])
        weights[target] = weight
        ports.append(Port(target, weight.dtype, weight.shape))
        nodes[node] = graph.placeholder(target.replace(".", "_"))

    outputs: tuple[Port, ...] = ()
    final = dict(zip(returned(exported.graph), facts.outputs, strict=True))
    for node in exported.graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), nodes.__getitem__)
            origin = _origin(node)
            label = final.get(node) or _label(node, origin, args)
            clone = graph.create_node("call_function", node.target, args, kwargs, name=label)
            clone.meta["origin"] = origin
            nodes[node] = clone
        elif node.op == "output":
            graph.output(tuple(nodes[source] for source in node.args[0]))
            # The real ports come out of the first propagation.
            outputs = tuple(Port(name, torch.float32, ()) for name in facts.outputs)

    inputs = tuple(Port(fact.name, fact.dtype, fact.shape) for fact in facts.inputs)
    region = Region("main", graph, inputs, tuple(ports), outputs)
    call = Call("main", 0, tuple(port.name for port in inputs), tuple(weights), facts.outputs)
    return Program(facts, {"main": region}, (call,), facts.outputs, weights, Level.TRACED)


def _export(
    config: Config, dtypes: Mapping[str, torch.dtype], facts: ModelFacts
) -> torch.export.ExportedProgram:
    dims = {name: torch.export.Dim(name) for name in _SIZES}
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = _instantiate(config)
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(dtypes[name])
        example: dict[str, object] = {}
        dynamic: dict[str, object] = {}
        for fact in facts.inputs:
            sizes = [_SIZES[dim] if isinstance(dim, str) else dim for dim in fact.shape]
            example[fact.name] = torch.zeros(sizes, dtype=fact.dtype)
            dynamic[fact.name] = {i: dims[dim] for i, dim in enumerate(fact.shape) if isinstance(dim, str)}
        example |= {"attention_kwargs": None, "return_dict": False}
        dynamic |= {"attention_kwargs": None, "return_dict": None}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(model, (), example, dynamic_shapes=dynamic, strict=False)
    except torch._dynamo.exc.UserError as error:
        raise BuildError(
            f"Diffusers' transformer cannot be traced with free lengths ({str(error).splitlines()[0]})",
            "install the diffusers version this release of h3compile names",
        ) from error


def _computed_buffers(config: Config) -> dict[str, torch.Tensor]:
    """The buffers the model computes at construction and does not load, with their real values."""
    from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3RotaryPosEmbed

    rope = MiniMaxH3RotaryPosEmbed(config["rope_freq_dim"], config["rope_theta"])
    return {"rope.inv_freq": rope.inv_freq}


def _label(node: fx.Node, origin: str, args: tuple[object, ...]) -> str | None:
    """A telling name for a node, or ``None``; a cast is named after what it casts."""
    operator = str(node.target)
    if operator == "aten.to.dtype" and isinstance(args[0], fx.Node) and args[0].name in LABELS.values():
        return f"{args[0].name}_{str(args[1]).removeprefix('torch.').replace('float', 'f')}"
    return LABELS.get((re.sub(r"\b\d+\b", "*", origin), operator))


def _origin(node: fx.Node) -> str:
    """The module that made the node, as a dotted path."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, _ = next(reversed(stack.values()))
    return str(path)
