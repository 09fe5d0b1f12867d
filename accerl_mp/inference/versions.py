"""Which policy version sampled each token of a reply."""


class VersionLedger:
    """The version in use, and where in each running reply it changed.

    Stamping tokens when they arrive would be wrong: tokens of the old weights still come in after a pause. The worker says
    instead how many tokens each request had at the swap.

    Example: a request starts under version 4, is cut at 3 tokens by the push of version 5 and ends with 5 tokens:
    `[(0, 4), (3, 5)]` -> `[4, 4, 4, 5, 5]`.
    """

    def __init__(self) -> None:
        self.version = -1
        """Of the next token; -1 before the first push."""
        self._running: dict[str, list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def start(self, key: str) -> None:
        self._running[key] = [(0, self.version)]

    def cut(self, num_tokens: dict[str, int], version: int) -> None:
        """The swap to `version`: `num_tokens` is what existed of each request; one that is missing had not begun."""
        for key, spans in self._running.items():
            spans.append((num_tokens.get(key, 0), version))
        self.version = version

    def finish(self, key: str, num_tokens: int) -> list[int]:
        """The version of each of a reply's tokens. The request is forgotten."""
        spans = self._running.pop(key)
        ends = [start for start, _ in spans[1:]] + [num_tokens]
        versions: list[int] = []
        for (_, version), end in zip(spans, ends, strict=True):
            # A worker may have sampled past the stop token, so a cut can lie behind the reply's end.
            versions += [version] * (min(end, num_tokens) - len(versions))
        return versions

    def forget(self, key: str) -> None:
        """A request that ended without a reply."""
        self._running.pop(key, None)
