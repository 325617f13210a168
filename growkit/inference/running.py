"""Observe how a class uses its tensors, in a small model while it runs.

Every product of matrices shows which dimension of a parameter it sums over: the parameter reads
that dimension. What a module of attention is given shows whether it reads hidden states. The effect
of a norm is measured on the norm itself.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from growkit.base.errors import foreign
from growkit.base.limits import within
from growkit.inference.classes import DESCRIBE, ModelClass, as_in_files, run

EPS = ("eps", "epsilon", "norm_eps")
"""Suffixes of config keys for the number that a norm adds to a mean."""


@dataclass(frozen=True)
class NormSeen:
    """The observed behaviour of a norm.

    Attributes:
        centred: whether it subtracts the mean first.
        offset: number that it adds to its weight.
        behind: whether it reads the output of attention or MLP, before the residual addition.
        last: whether it follows all layers.
        eps: config key of the number that it adds to a mean; None if the class fixes it.
    """

    centred: bool
    offset: float
    behind: bool
    last: bool
    eps: str | None


@dataclass
class Observation:
    """Observations of a model while it ran, by the names of tensors in its files.

    Attributes:
        reads: dimensions of tensors that products sum over, or that are looked up.
        stacks: dimensions that count matrices, each of which is used alone.
        inner: tensors of attention, except for the dimensions in ``outer``.
        outer: dimensions of tensors of attention that read or write hidden states.
        norms: the behaviour of every norm, by the names of its tensors.
        bare: the behaviour of norms without a weight, each with the width of its input.
        normed_sums: whether what layers return comes from a norm.
    """

    reads: set[tuple[str, int]] = field(default_factory=set)
    stacks: set[tuple[str, int]] = field(default_factory=set)
    inner: set[str] = field(default_factory=set)
    outer: set[tuple[str, int]] = field(default_factory=set)
    norms: dict[str, NormSeen] = field(default_factory=dict)
    bare: set[tuple[NormSeen, int]] = field(default_factory=set)
    normed_sums: bool = False


def see(asked: ModelClass) -> Observation:
    """Run a small model of a class once, and observe it.

    Raises:
        InputError: it does not run.
    """
    with foreign(f"no small model of {asked.name} runs", DESCRIBE):
        model = asked.small_model()
        products = _Products(model)
        watched = _Watch(model, asked.class_prefix)
        with watched, products:
            run(model)
    places = _places(model)
    seen = Observation(normed_sums=watched.normed_sums)
    norms = _norms(asked, model, watched)
    seen.bare = {
        (replace(norm, behind=False, last=False), watched.widths[name])
        for name, norm in norms.items()
        if not [*model.get_submodule(name).parameters()]
    }
    for name, (parameter, dimensions) in places.items():
        module = parameter.rpartition(".")[0]
        for at, dimension in enumerate(dimensions):
            if (parameter, dimension) in products.reads:
                seen.reads.add((name, at))
            if (parameter, dimension) in products.stacks:
                seen.stacks.add((name, at))
        if module in norms:
            seen.norms[name] = norms[module]
        if watched.attention_of(module):
            seen.inner.add(name)
            reads = {at for at in range(len(dimensions)) if (name, at) in seen.reads}
            outer = reads if module in watched.reads_hidden else {*range(len(dimensions))} - reads
            if module in watched.writes_hidden or module in watched.reads_hidden:
                seen.outer |= {(name, at) for at in outer}
    return seen


def _places(model: nn.Module) -> dict[str, tuple[str, list[int | None]]]:
    """For each tensor in files, the parameter whose numbers it holds, and of its dimensions theirs.

    Every number of every parameter is another one, and the class saves them.
    """
    numbered, begins, count = {}, [], 0
    for name, tensor in model.state_dict().items():
        begins.append((count, name, tuple(tensor.shape)))
        numbered[name] = torch.arange(count, count + tensor.numel(), dtype=torch.float64).view(
            tensor.shape
        )
        count += tensor.numel()
    found = {}
    for name, tensor in as_in_files(model, numbered).items():
        first = int(tensor.flatten()[0]) if tensor.numel() else -1
        _, own, shape = next((b for b in reversed(begins) if b[0] <= first), (0, name, ()))
        strides = torch.empty(shape, device="meta").stride()
        dimensions: list[int | None] = []
        for at, size in enumerate(tensor.shape):
            step = 0
            if size > 1:
                step = int(tensor.select(at, 1).flatten()[0]) - first
            fitting = [d for d, stride in enumerate(strides) if 0 < stride <= abs(step)]
            dimensions.append(fitting[0] if fitting and shape[fitting[0]] > 1 else None)
        same = tensor.shape == shape
        found[name] = own, [at if same else each for at, each in enumerate(dimensions)]
    return found


SUMMED = {"mm": ((0, 1), (1, 0)), "addmm": ((1, 1), (2, 0)), "mv": ((0, 1), (1, 0))}
"""Arguments and dimensions over which torch's products of matrices sum."""

BATCHED = {"bmm": (0, 1), "baddbmm": (1, 2)}
"""Arguments that are matrices in products of many."""


class _Products(TorchDispatchMode):
    """Records which dimensions of parameters products sum over, and which count matrices.

    Attributes:
        reads: parameters and dimensions.
        stacks: likewise.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: set[tuple[str, int]] = set()
        self.stacks: set[tuple[str, int]] = set()
        self._kept: list[Any] = []
        self._known: dict[int, list[tuple[int, int, tuple[str, int]]]] = {}
        for name, parameter in model.named_parameters():
            strides = list(zip(parameter.shape, parameter.stride(), strict=True))
            self._remember(parameter, [(s, size, (name, d)) for d, (size, s) in enumerate(strides)])

    def _remember(self, tensor: torch.Tensor, dims: list[tuple[int, int, tuple[str, int]]]) -> None:
        if tensor.numel():
            self._kept.append(tensor)
            self._known[tensor.untyped_storage().data_ptr()] = dims

    def _whose(self, tensor: Any, at: int) -> tuple[str, int] | None:
        """The parameter and dimension along which a dimension of a tensor runs."""
        if not isinstance(tensor, torch.Tensor) or tensor.shape[at] < 2:
            return None
        known = self._known.get(tensor.untyped_storage().data_ptr(), [])
        fitting = [each for each in known if each[1] > 1 and each[0] <= tensor.stride(at)]
        return max(fitting)[2] if fitting else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        operation = func.overloadpacket.__name__
        found: list[tuple[str, int] | None] = []
        if operation in SUMMED:
            found = [self._whose(args[which], at) for which, at in SUMMED[operation]]
        elif operation in BATCHED:
            one, other = (args[which] for which in BATCHED[operation])
            found = [self._whose(one, 2), self._whose(other, 1)]
            self.stacks |= {w for each in (one, other) if (w := self._whose(each, 0))}
        elif operation == "embedding":
            found = [self._whose(args[0], 0)]
        elif operation == "convolution" and args[8] == 1:
            found = [self._whose(args[1], 1)]
        elif operation in ("select", "unbind") and isinstance(args[0], torch.Tensor):
            at = args[1] if len(args) > 1 else 0
            whose = self._whose(args[0], at) if args[0].dim() > 2 else None
            if whose is not None and args[0].untyped_storage().data_ptr() in self._known:
                self.stacks.add(whose)
        elif isinstance(made, torch.Tensor) and args and isinstance(args[0], torch.Tensor):
            one = args[0]
            known = self._known.get(one.untyped_storage().data_ptr())
            alone = not any(isinstance(each, torch.Tensor) for each in args[1:])
            if known and alone and made.shape == one.shape:
                mine = [
                    (made.stride(d), made.shape[d], w)
                    for d in range(made.dim())
                    if (w := self._whose(one, d))
                ]
                if made.untyped_storage().data_ptr() not in self._known:
                    self._remember(made, mine)
        self.reads |= {each for each in found if each}
        return made


class _Watch:
    """Records inputs and outputs of modules in one run.

    Attributes:
        reads_hidden: linear modules of attention that read the same input as the attention.
        writes_hidden: linear modules of attention whose output is that of the attention.
        widths: width of the input of every norm.
        normed_sums: whether what the last layer returns comes from a norm.
        behind: norms that read the output of attention or MLP, before the residual addition.
        last: the norm that follows all layers, the last one if several do.
    """

    def __init__(self, model: nn.Module, layers: str) -> None:
        self.model, self.prefix = model, layers
        self.reads_hidden: set[str] = set()
        self.writes_hidden: set[str] = set()
        self.behind: set[str] = set()
        self.last: set[str] = set()
        self.widths: dict[str, int] = {}
        self.norms = [
            name
            for name, module in model.named_modules()
            if "norm" in type(module).__name__.lower() and not [*module.children()]
        ]
        self._attentions = [
            f"{name}."
            for name, module in model.named_modules()
            if "attention" in type(module).__name__.lower() and name.startswith(layers)
        ]
        self._given: dict[str, list[Any]] = {}
        self._made: dict[str, list[Any]] = {}
        self._linear: dict[str, list[tuple[str, Any]]] = {}
        self._layers_done = 0
        self._normed: Any = None
        self._residual: Any = None
        self.normed_sums = False
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self.model.named_modules():
            before, after = self._before(name), self._after(name)
            self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(after))

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def attention_of(self, module: str) -> str | None:
        """The attention that a module is part of."""
        return next((each for each in self._attentions if f"{module}.".startswith(each)), None)

    def _layer(self, name: str) -> str | None:
        rest = name.removeprefix(self.prefix)
        return rest.partition(".")[0] if rest != name else None

    def _before(self, name: str) -> Any:
        layer, attention = self._layer(name), self.attention_of(name)

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            if f"{name}." == attention:
                self._given[attention] = given
            if layer is not None and name == self.prefix + layer:
                self._residual = given[0] if given else None
            if not given:
                return
            around = self._given.get(attention or "", [])
            if attention and name + "." != attention and any(_same(given[0], e) for e in around):
                self.reads_hidden.add(name)
            if name in self.norms:
                self.widths[name] = given[0].shape[-1]
                made = self._made.get(layer or "", [])
                if layer and not attention and any(each is given[0] for each in made):
                    self.behind.add(name)
                if layer is None and self._layers_done:
                    self.last = {name}

        return hook

    def _after(self, name: str) -> Any:
        layer, attention = self._layer(name), self.attention_of(name)
        whole = layer is not None and name == self.prefix + layer

        def hook(module: nn.Module, args: Any, made: Any) -> None:
            outcome = made[0] if isinstance(made, tuple | list) else made
            matrix = getattr(getattr(module, "weight", None), "dim", int)() == 2
            if attention and matrix and isinstance(outcome, torch.Tensor):
                self._linear.setdefault(attention, []).append((name, outcome))
            if f"{name}." == attention and isinstance(outcome, torch.Tensor):
                inside = self._linear.get(attention, [])
                last = [each for each, its in inside if _same(its, outcome)]
                # An attention that adds hidden states itself returns what no module has made.
                self.writes_hidden.update(last or [each for each, _ in inside][-1:])
            if name in self.norms:
                self._normed = outcome
            if whole:
                self._layers_done += 1
                self.normed_sums = outcome is self._normed
            elif layer and name not in self.norms:
                given = args[0] if args else None
                adds = any(each is self._residual for each in args[1:])
                if outcome is not given and not adds:  # unlike dropout, which returns its input
                    self._made.setdefault(layer, []).append(outcome)

        return hook


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (one.data_ptr() == other.data_ptr() and one.numel() == other.numel())


def _norms(asked: ModelClass, model: nn.Module, watched: _Watch) -> dict[str, NormSeen]:
    """Measure every norm that ran and has the effect of one."""
    given = asked.config({}).to_dict()
    keys = [key for key, value in given.items() if isinstance(value, float) and key.endswith(EPS)]
    varied = {key: asked.model(asked.config({key: 0.123}), "meta") for key in keys}
    found = {}
    for name in watched.norms:
        if name not in watched.widths:
            continue
        module = model.get_submodule(name)
        behaviour = _behaviour(module, watched.widths[name])
        if behaviour is None:
            continue
        eps = next((key for key in keys if _eps(varied[key].get_submodule(name)) == 0.123), None)
        found[name] = NormSeen(*behaviour, name in watched.behind, name in watched.last, eps)
    return found


def _eps(module: nn.Module) -> float | None:
    found = (getattr(module, name, None) for name in ("eps", "variance_epsilon", "epsilon"))
    return next((each for each in found if each is not None), None)


def _behaviour(module: nn.Module, width: int) -> tuple[bool, float] | None:
    """Measure whether a norm subtracts the mean, and the number that it adds to its weight.

    None if the module does not behave like a norm of one input.
    """
    generator = torch.Generator().manual_seed(1)
    weight: Any = getattr(module, "weight", None)
    has_weight = isinstance(weight, torch.Tensor)
    shape = (3, *weight.shape) if has_weight and weight.shape[-1:] == (width,) else (3, width)
    given = 3 * torch.randn(shape, generator=generator)
    try:
        with torch.no_grad():
            as_it_is, shifted = module(given), module(given + 2.0)
            centred = bool((as_it_is - shifted).abs().max() < 1e-3)
            mean = given.mean(-1, keepdim=True) if centred else 0.0
            plain = (given - mean) / (given - mean).square().mean(-1, keepdim=True).sqrt()
            if not has_weight:
                offset, left = 0.0, as_it_is - plain
            else:
                kept = [each.clone() for each in module.parameters()]
                for each in module.parameters():
                    each.zero_()
                offset = round(float((module(given) / plain).mean()), 3)
                left = module(given) - offset * plain
                for each, was in zip(module.parameters(), kept, strict=True):
                    each.copy_(was)
    except Exception:  # it takes more than one input, or another shape
        return None
    if not within(float(left.abs().max()), 1e-3):
        return None
    return centred, offset
