"""Files and messages as a bad disk, a bad line or a bad neighbour makes them of good ones."""

from __future__ import annotations

from hypothesis import strategies as st


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """`whole` with a few places overwritten, cut out, doubled or lengthened, or without its end."""
    mutant = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(0, len(mutant) - 1)))
        end = min(len(mutant), start + draw(st.sampled_from([0, 1, 1, 2, 4, 64])))
        kind = draw(st.sampled_from(["overwrite", "overwrite", "replace", "double", "cut"]))
        if kind == "overwrite":
            mutant[start:end] = draw(st.binary(min_size=end - start, max_size=end - start))
        elif kind == "replace":
            mutant[start:end] = draw(st.binary(max_size=12) | st.just(b"[" * 3000))
        elif kind == "double":
            mutant[start:start] = mutant[start:end]
        else:
            del mutant[start:]
    return bytes(mutant)
