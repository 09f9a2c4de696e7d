"""Run compiled GPU kernels without a GPU: an emulator of the PTX that Triton emits.

All threads of a block run in lockstep, every register an array over them, blocks one after
another. That asks for branches that a whole block takes alike, which the kernels have. What
lockstep would hide, the shared memory reports: what two warps touch, one of them writing, without
a barrier between, or what a copy in flight may still overwrite, raises :class:`Race`. Global memory
outside of all tensors raises :class:`OutOfBounds`, an address that is no multiple of what is moved
:class:`Misaligned`.
The special-function unit is exact here but for one rounding; how far it errs is a GPU's to show.
"""

import re

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

WARP = 32
_INT = {"s16": np.int16, "s32": np.int32, "s64": np.int64, "u16": np.uint16, "u32": np.uint32}
_DTYPES = _INT | {
    "u64": np.uint64, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "f32": np.float32,
    "f16": np.float16,
}  # fmt: skip
_WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_ELEMENTWISE = {
    "add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "min": np.fmin, "max": np.fmax, "neg": np.negative, "abs": np.abs,
    "not": np.invert, "rem": np.fmod,
}  # fmt: skip
_TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


class Race(AssertionError):
    """Two warps touch the same shared memory in an order that nothing fixes."""


class OutOfBounds(AssertionError):
    """A byte of global memory that is no tensor's, or of shared memory that the block has not."""


class Misaligned(AssertionError):
    """An address that a GPU would refuse for a load, store or copy of this width."""


def check_alignment(addresses: np.ndarray, size: int) -> None:
    if (addresses % size).any():
        raise Misaligned(
            f"{size} bytes at {np.unique(addresses[addresses % size != 0])[:8].tolist()}"
        )


# between tensors: further than from a state, row or tile to the next
_GAP = 2**20


class GlobalMemory:
    """Tensors side by side in one address space; :meth:`read_back` copies results to them."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.storages, end = {}, 4096
        for tensor in tensors:
            storage = tensor.untyped_storage()
            # views of one storage share its addresses
            if storage.data_ptr() not in self.storages:
                content = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
                self.storages[storage.data_ptr()] = end, content
                end += -(-len(content) // 256) * 256 + _GAP
        self.bytes, self.is_owned = np.full(end, 0xFF, np.uint8), np.zeros(end, bool)
        for first, content in self.storages.values():
            self.bytes[first : first + len(content)] = content
            self.is_owned[first : first + len(content)] = True

    def check(self, addresses: np.ndarray) -> None:
        is_owned = (addresses >= 0) & (addresses < len(self.bytes))
        is_owned[is_owned] = self.is_owned[addresses[is_owned]]
        if not is_owned.all():
            raise OutOfBounds(f"global bytes {np.unique(addresses[~is_owned])[:8].tolist()}")

    def address(self, tensor: torch.Tensor) -> int:
        first, _ = self.storages[tensor.untyped_storage().data_ptr()]
        return first + tensor.storage_offset() * tensor.element_size()

    def read_back(self) -> None:
        for first, content in self.storages.values():
            content[:] = self.bytes[first : first + len(content)]


class SharedMemory:
    """Shared memory that knows which warp touched a half of a word since the last barrier."""

    def __init__(self, size: int, num_threads: int) -> None:
        self.bytes = np.full(size, 0xFF, np.uint8)
        self.epoch = 0
        self.warp = np.arange(num_threads) // WARP
        halves = size // 2
        self.write_epoch, self.read_epoch = np.full(halves, -1), np.full(halves, -1)
        self.writer, self.reader = np.full(halves, -1), np.full(halves, -1)
        self.in_flight = np.zeros(halves, bool)

    def check(self, addresses: np.ndarray, size: int, warps: np.ndarray, *, write: bool) -> None:
        if ((addresses < 0) | (addresses + size > len(self.bytes))).any():
            raise OutOfBounds(f"shared bytes {np.unique(addresses)[[0, -1]].tolist()}")
        halves = (addresses[:, None] + np.arange(0, size, 2)) // 2
        warps = np.broadcast_to(warps[:, None], halves.shape)
        clash = self.in_flight[halves]
        clash |= (self.write_epoch[halves] == self.epoch) & (self.writer[halves] != warps)
        if write:
            # reader -2: read by several warps
            clash |= (self.read_epoch[halves] == self.epoch) & (self.reader[halves] != warps)
        if clash.any():
            raise Race(f"halves of shared words {np.unique(halves[clash])[:8].tolist()}")
        flat, of = halves.ravel(), warps.ravel()
        if write:
            self.write_epoch[flat], self.writer[flat] = self.epoch, of
            if (self.writer[flat] != of).any():
                lost = np.unique(flat[self.writer[flat] != of])
                raise Race(f"halves of shared words {lost[:8].tolist()}")
        else:
            fresh = self.read_epoch[flat] != self.epoch
            self.reader[flat] = np.where(fresh | (self.reader[flat] == of), of, -2)
            several = self.reader[flat] != of
            self.reader[flat[several]] = -2
            self.read_epoch[flat] = self.epoch


class EmulatedKernel:
    """Stands for a kernel: launched like it, compiled for a Hopper GPU, run here."""

    def __init__(self, kernel) -> None:
        self.kernel, self.compiled = kernel, {}

    def __getitem__(self, grid: tuple[int]):
        def launch(*args, num_warps: int, maxnreg: int | None = None, **constants) -> None:
            types, attributes, params = {}, {}, []
            constants = {(self.kernel.arg_names.index(k),): v for k, v in constants.items()}
            for i, (name, arg) in enumerate(zip(self.kernel.arg_names, args)):
                if arg is None:
                    constants[i,] = None
                    continue
                is_tensor = isinstance(arg, torch.Tensor)
                number = "fp32" if isinstance(arg, float) else "i32"
                types[name] = _TYPES[arg.dtype] if is_tensor else number
                if (arg.storage_offset() * arg.element_size() if is_tensor else arg) % 16 == 0:
                    attributes[i,] = [["tt.divisibility", 16]]
                params.append(arg)
            signature = {name: types.get(name, "constexpr") for name in self.kernel.arg_names}
            key = str((signature, constants, attributes, num_warps, maxnreg))
            if key not in self.compiled:
                source = GluonASTSource if isinstance(self.kernel, GluonJITFunction) else ASTSource
                self.compiled[key] = triton.compile(
                    source(self.kernel, signature, constants, attributes),
                    target=GPUTarget("cuda", 90, 32),
                    options={"num_warps": num_warps, "maxnreg": maxnreg},
                )
            compiled = self.compiled[key]
            shared = compiled.metadata.shared
            run_kernel(compiled.asm["ptx"], grid[0], WARP * num_warps, shared, params)

        return launch


def run_kernel(
    ptx: str,
    grid: int,
    num_threads: int,
    shared_size: int,
    params: list[torch.Tensor | int | float],
) -> None:
    """Run every block of a one-dimensional grid.

    Args:
        ptx: The kernel.
        grid: Number of blocks.
        num_threads: Threads of a block.
        shared_size: Bytes of shared memory of a block.
        params: Tensors, written in place, and numbers.
    """
    memory = GlobalMemory([p for p in params if isinstance(p, torch.Tensor)])
    values = [
        memory.address(p) if isinstance(p, torch.Tensor)
        else int(np.float32(p).view(np.uint32)) if isinstance(p, float)
        else p
        for p in params
    ]  # fmt: skip
    program = _parse(ptx)
    for i_block in range(grid):
        _Block(program, memory, i_block, num_threads, shared_size, values).run()
    memory.read_back()


def _parse(ptx: str) -> tuple[list, dict[str, int]]:
    """Return instructions ``(guard, opcode, operands)`` and where the labels stand."""
    body = re.sub(r"//[^\n]*", "", ptx[ptx.index("{\n", ptx.index(".entry")) + 1 :])
    body = body[: body.index("ret;") + 4]
    instructions, labels = [], {}
    body = re.sub(r"^\s*\.(loc|file|pragma)[^\n]*$", "", body, flags=re.M)
    for statement in re.split(r";|(?<=:)\n|\{(?=\s*\.reg)", body):
        # the end of a scope of registers, where no operand opened a brace
        statement = re.sub(r"^[\s}]+", "", statement).strip()
        while label := re.match(r"(\$?\w+):\s*", statement):
            labels[label[1]] = len(instructions)
            statement = statement[label.end() :]
        if not statement or statement.startswith(".reg"):
            continue
        match = re.match(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", statement, re.S)
        guard = (match[2], match[1] == "!") if match[2] else None
        operands = [o.strip() for o in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", match[4])]
        instructions.append((guard, match[3].split("."), operands))
    return instructions, labels


class _Block:
    def __init__(self, program, memory, i_block, num_threads, shared_size, values) -> None:
        self.instructions, self.labels = program
        self.memory, self.values = memory, values
        self.shared = SharedMemory(shared_size, num_threads)
        self.num_threads = num_threads
        tid = np.arange(num_threads, dtype=np.uint32)
        self.registers = {
            "%tid.x": tid, "%laneid": tid % WARP, "%ctaid.x": np.full_like(tid, i_block),
        }  # fmt: skip
        self.copies, self.groups = [], []

    def run(self) -> None:
        at = 0
        while True:
            guard, opcode, operands = self.instructions[at]
            at += 1
            active = None
            if guard is not None:
                active = self.registers[guard[0]] ^ guard[1]
            if opcode[0] == "ret":
                return
            if opcode[0] == "bra":
                taken = True if active is None else bool(active[0])
                assert active is None or (active == taken).all(), "a block must branch as a whole"
                if taken:
                    at = self.labels[operands[0]]
                continue
            if opcode[0] in _ELEMENTWISE:
                self._arithmetic(_ELEMENTWISE[opcode[0]], opcode[-1], operands, active)
            else:
                getattr(self, "_" + opcode[0])(opcode[1:], operands, active)

    # operands

    def _get(self, name: str, kind: str) -> np.ndarray:
        dtype = bool if kind == "pred" else _DTYPES[kind]
        if name in self.registers:
            value = self.registers[name]
            return value if kind == "pred" else value.view(dtype)
        if name == "global_smem":
            value = 0
        elif name.startswith("0f"):
            return np.full(self.num_threads, int(name[2:], 16), np.uint32).view(np.float32)
        else:
            value = int(name, 0)
        mask = (1 << 8 * np.dtype(dtype).itemsize) - 1
        unsigned = _WORDS.get(np.dtype(dtype).itemsize, bool)
        return np.full(self.num_threads, value & mask, unsigned).view(dtype)

    def _set(self, name: str, value: np.ndarray, active: np.ndarray | None = None) -> None:
        if value.dtype != bool:
            value = value.view(_WORDS[value.dtype.itemsize])
        if active is not None:
            value = np.where(active, value, self.registers[name])
        self.registers[name] = value

    def _address(self, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[] ").replace(" ", "").partition("+")
        value = self.registers[base] if base in self.registers else self._get(base, "u64")
        return value.astype(np.int64) + int(offset or 0)

    @staticmethod
    def _names(operand: str) -> list[str]:
        return [name.strip() for name in operand.strip("{} ").split(",")]

    # arithmetic

    def _arithmetic(self, function, kind, operands, active, *, kinds=None):
        sources = [self._get(o, k) for o, k in zip(operands[1:], kinds or [kind] * 9)]
        self._set(operands[0], np.asarray(function(*sources)), active)

    def _shl(self, mods, operands, active):
        kinds = [mods[-1], "u32"]
        shift = lambda a, n: a << np.minimum(n, 63).astype(a.dtype)  # noqa: E731
        self._arithmetic(shift, mods[-1], operands, active, kinds=kinds)

    def _shr(self, mods, operands, active):
        shift = lambda a, n: a >> n.astype(a.dtype)  # noqa: E731
        self._arithmetic(shift, mods[-1], operands, active, kinds=[mods[-1], "u32"])

    def _div(self, mods, operands, active):
        def divide(a, b):
            return a / b if a.dtype == np.float32 else np.trunc(a / b).astype(a.dtype)

        self._arithmetic(divide, mods[-1], operands, active)

    def _mul(self, mods, operands, active):
        self._mad(mods, operands, active)

    def _mad(self, mods, operands, active):
        wide = kind = mods[-1]
        sources = [self._get(o, kind) for o in operands[1:3]]
        if "wide" in mods or "hi" in mods:
            wide = kind[0] + str(2 * int(kind[1:]))
            sources = [source.astype(_DTYPES[wide]) for source in sources]
        result = sources[0] * sources[1]
        if "hi" in mods:
            result = (result >> int(kind[1:])).astype(_DTYPES[kind])
            wide = kind
        if len(operands) == 4:
            result = result + self._get(operands[3], wide)
        self._set(operands[0], result, active)

    def _fma(self, mods, operands, active):
        def fused(a, b, c):
            return (a.astype(np.float64) * b + c).astype(np.float32)

        self._arithmetic(fused, mods[-1], operands, active)

    def _special(self, function, operands, active):
        def flushed(a):
            result = function(a.astype(np.float64)).astype(np.float32)
            return np.where(np.abs(result) < 2.0**-126, np.float32(0), result)

        self._arithmetic(flushed, "f32", operands, active)

    def _ex2(self, mods, operands, active):
        self._special(np.exp2, operands, active)

    def _rcp(self, mods, operands, active):
        self._special(lambda a: 1 / a, operands, active)

    def _setp(self, mods, operands, active):
        if mods[-1] == "bf16":
            values = [self._get(o, "b16").astype(np.uint32) << 16 for o in operands[1:]]
            self._set(operands[0], _COMPARE[mods[0]](*(v.view(np.float32) for v in values)))
            return
        if mods[-1] == "f16x2":
            halves = [self._get(o, "b32").view(np.float16).reshape(-1, 2) for o in operands[1:]]
            for name, results in zip(operands[0].split("|"), _COMPARE[mods[0]](*halves).T):
                self._set(name, results.copy(), active)
            return
        self._arithmetic(_COMPARE[mods[0]], mods[-1], operands, active)

    def _selp(self, mods, operands, active):
        kinds = [mods[-1], mods[-1], "pred"]
        pick = lambda a, b, p: np.where(p, a, b)  # noqa: E731
        self._arithmetic(pick, mods[-1], operands, active, kinds=kinds)

    def _bfe(self, mods, operands, active):
        def extract(a, first, length):
            return a >> first & (1 << length) - 1

        self._arithmetic(extract, mods[-1], operands, active)

    def _prmt(self, mods, operands, active):
        a, b = (self._get(o, "u32").astype(np.uint64) for o in operands[1:3])
        pool, select = a | b << np.uint64(32), int(operands[3], 0)
        result = np.zeros(self.num_threads, np.uint64)
        for i in range(4):
            source = np.uint64(8 * (select >> 4 * i & 7))
            result |= (pool >> source & np.uint64(0xFF)) << np.uint64(8 * i)
        self._set(operands[0], result.astype(np.uint32), active)

    def _cvt(self, mods, operands, active):
        to, source = mods[-2], mods[-1]
        if to in ("bf16x2", "f16x2"):
            half = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}[to]
            high, low = (
                torch.from_numpy(self._get(o, "f32").copy()).to(half).view(torch.int16).numpy()
                for o in operands[1:3]
            )
            result = high.view(np.uint16).astype(np.uint32) << 16 | low.view(np.uint16)
        elif to in ("bf16", "f16"):
            half = {"bf16": torch.bfloat16, "f16": torch.float16}[to]
            value = torch.from_numpy(self._get(operands[1], "f32").copy())
            result = value.to(half).view(torch.int16).numpy().view(np.uint16)
        elif source == "bf16":
            result = (self._get(operands[1], "b16").astype(np.uint32) << 16).view(np.float32)
        else:
            result = self._get(operands[1], source).astype(_DTYPES[to])
        self._set(operands[0], result, active)

    def _mov(self, mods, operands, active):
        target, source = operands
        if target.startswith("{"):
            parts = self._get(source, "b32").view(np.uint16).reshape(-1, 2)
            for name, part in zip(self._names(target), parts.T):
                if name != "_":
                    self._set(name, part.copy(), active)
        elif source.startswith("{"):
            parts = [self._get(name, "b16") for name in self._names(source)]
            self._set(target, np.stack(parts, 1).view(np.uint32)[:, 0].copy(), active)
        else:
            self._set(target, self._get(source, mods[-1]), active)

    # memory

    def _ld(self, mods, operands, active):
        if mods[0] == "param":
            value = self.values[int(re.search(r"param_(\d+)", operands[1])[1])]
            self._set(operands[0], self._get(str(value), mods[-1]))
            return
        kind, names = mods[-1], self._names(operands[0])
        dtype, address = _DTYPES[kind], self._address(operands[1])
        size = np.dtype(dtype).itemsize
        chosen = np.arange(self.num_threads) if active is None else np.flatnonzero(active)
        check_alignment(address[chosen], size * len(names))
        space = self.memory
        if mods[0].startswith("shared"):
            space = self.shared
            space.check(address[chosen], size * len(names), space.warp[chosen], write=False)
        else:
            space.check(address[chosen, None] + np.arange(size * len(names)))
        for i, name in enumerate(names):
            value = np.zeros(self.num_threads, dtype)
            if name in self.registers:
                value = self._get(name, kind).copy()
            value[chosen] = space.bytes.view(dtype)[(address[chosen] + i * size) // size]
            self._set(name, value)

    def _st(self, mods, operands, active):
        names, dtype = self._names(operands[1]), _DTYPES[mods[-1]]
        address, size = self._address(operands[0]), np.dtype(dtype).itemsize
        chosen = np.arange(self.num_threads) if active is None else np.flatnonzero(active)
        check_alignment(address[chosen], size * len(names))
        space = self.memory
        if mods[0].startswith("shared"):
            space = self.shared
            space.check(address[chosen], size * len(names), space.warp[chosen], write=True)
        else:
            space.check(address[chosen, None] + np.arange(size * len(names)))
        for i, name in enumerate(names):
            where = (address[chosen] + i * size) // size
            space.bytes.view(dtype)[where] = self._get(name, mods[-1])[chosen]

    def _ldmatrix(self, mods, operands, active):
        names, tid = self._names(operands[0]), np.arange(self.num_threads)
        for i, name in enumerate(names):
            where = self._row_addresses(operands[1], i) + tid % 4 * 4
            self.shared.check(where, 4, self.shared.warp, write=False)
            self._set(name, self.shared.bytes.view(np.uint32)[where // 4])

    def _stmatrix(self, mods, operands, active):
        tid = np.arange(self.num_threads)
        for i, name in enumerate(self._names(operands[1])):
            where = self._row_addresses(operands[0], i) + tid % 4 * 4
            self.shared.check(where, 4, self.shared.warp, write=True)
            self.shared.bytes.view(np.uint32)[where // 4] = self._get(name, "b32")

    def _row_addresses(self, operand: str, i_matrix: int) -> np.ndarray:
        tid = np.arange(self.num_threads)
        # lane 8 i + r holds the address of row r of matrix i; a row goes to four lanes
        return self._address(operand)[tid // WARP * WARP + 8 * i_matrix + tid % WARP // 4]

    def _shfl(self, mods, operands, active):
        value, tid = self._get(operands[1], "b32"), np.arange(self.num_threads)
        lane = self._get(operands[2], "b32")
        source = tid ^ lane if mods[1] == "bfly" else tid // WARP * WARP + lane
        self._set(operands[0], value[source])

    def _bar(self, mods, operands, active):
        self.shared.epoch += 1

    def _cp(self, mods, operands, active):
        if mods[1] == "commit_group":
            self.groups.append(self.copies)
            self.copies = []
        elif mods[1] == "wait_group":
            while len(self.groups) > int(operands[0]):
                self._land(self.groups.pop(0))
        else:
            chosen = np.arange(self.num_threads) if active is None else np.flatnonzero(active)
            target, source = (self._address(o)[chosen] for o in operands[:2])
            offsets, size = np.arange(int(operands[2], 0)), int(operands[2], 0)
            check_alignment(np.concatenate([target, source]), size)
            read = np.full(len(chosen), size)
            if len(operands) == 4:
                read = self._get(operands[3], "u32").astype(np.int64)[chosen]
            self.shared.check(target, size, self.shared.warp[chosen], write=True)
            halves = (target[:, None] + offsets[::2]) // 2
            self.shared.in_flight[halves] = True
            inside = offsets < read[:, None]
            self.memory.check((source[:, None] + offsets)[inside])
            data = self.memory.bytes[np.where(inside, source[:, None] + offsets, 0)]
            self.copies.append((chosen, target, np.where(inside, data, 0), halves))

    def _land(self, copies):
        for chosen, target, data, halves in copies:
            self.shared.bytes[target[:, None] + np.arange(data.shape[1])] = data
            self.shared.in_flight[halves] = False
            self.shared.write_epoch[halves] = self.shared.epoch
            self.shared.writer[halves] = self.shared.warp[chosen, None]
