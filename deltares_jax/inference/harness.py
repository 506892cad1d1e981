"""A model as lm-evaluation-harness wants it (extra `eval`)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from deltares_jax.data.tokens import Tokenizer
from deltares_jax.inference import generate, scoring

_MAX_GENERATED = 256  # where a task does not say
_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}


class HarnessModel(TemplateLM):
    """Answers the harness's requests, in batches of few lengths.

    Args:
      tokenizer: of the model.
      score_batches: see `scoring.score`.
      generator: see `generate.Generator`; may be None where nothing is generated.
      longest: tokens of a row at most, `data.seq_len`.
      batch_size: rows at a time.
      multiple: see `scoring.score`.

    Attributes:
      counts: what had to be cut.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        score_batches: scoring.ScoreBatches,
        generator: Any,
        longest: int,
        batch_size: int,
        multiple: int = 1,
    ):
        super().__init__()
        self._tokens, self._score_batches, self._generator = tokenizer, score_batches, generator
        self._longest, self._batch_size, self._multiple = longest, batch_size, multiple
        self.counts = scoring.Counts()

    @property
    def eot_token_id(self) -> int:
        """End-of-text; it also stands for an empty context."""
        return self._tokens.end_of_text

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids of a text; none are added."""
        ids: list[int] = self._tokens.encode_batch([string.encode()])[0].tolist()
        return ids

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of both by the harness's own rule: those of the whole text after the context's.

        What merges with the context so that nothing is left is encoded for itself. An empty
        context is end-of-text.
        """
        if not context:
            return [self.eot_token_id], self.tok_encode(continuation)
        before, after = self._encode_pair(context, continuation)
        if continuation and not after:
            after = self.tok_encode(continuation)
        return before or [self.eot_token_id], after

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-likelihood in nats, and whether greedy decoding gives it, of each continuation."""
        return self._scored([self._pair(*request.args) for request in requests])

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood in nats of each text, from end-of-text on."""
        texts = [self.tok_encode(text) for (text,) in (request.args for request in requests)]
        return [score for score, _ in self._scored([([self.eot_token_id], ids) for ids in texts])]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return self._scored([(before, after) for _, before, after in requests])

    def _scored(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[tuple[float, bool]]:
        scores, counts = scoring.score(
            self._score_batches, pairs, self._longest, self._batch_size, self._multiple
        )
        self._count(counts)
        return scores

    def _count(self, counts: scoring.Counts) -> None:
        for field in dataclasses.fields(counts):
            total = getattr(self.counts, field.name) + getattr(counts, field.name)
            setattr(self.counts, field.name, total)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What follows each context, up to the first of its stop texts or end-of-text."""
        answers = [""] * len(requests)
        groups: dict[Any, list[tuple[int, list[int]]]] = {}
        for number, request in enumerate(requests):
            context, options = request.args
            try:
                group, asked = self._options(options)
            except (TypeError, ValueError) as error:
                raise ValueError(f"generation_kwargs={options}: {error}") from error
            # What a task does not leave room for is cut at the start of the context, but not all.
            most = asked if asked < self._longest else max(1, self._longest // 2)
            ids = self.tok_encode(context) or [self.eot_token_id]
            room = self._longest - most
            over = max(0, len(ids) - room)
            self._count(scoring.Counts(1, int(over > 0), over, shortened=int(most < asked)))
            groups.setdefault((group, most), []).append((number, ids[over:]))
        for ((until, sampling), most), members in groups.items():
            members.sort(key=lambda member: -len(member[1]))
            for first in range(0, len(members), self._batch_size):
                part = members[first : first + self._batch_size]
                for (number, _), text in zip(
                    part, self._generated(part, until, sampling, most), strict=True
                ):
                    answers[number] = text
        return answers

    def _options(self, options: dict[str, Any]) -> tuple[Any, int]:
        """Stop texts and sampling of a request, and how many tokens it may take."""
        unknown = sorted(set(options) - _KNOWN)
        if unknown:
            raise ValueError(f"{', '.join(unknown)} is not of {', '.join(sorted(_KNOWN))}")
        until = options.get("until") or ()
        until = (until,) if isinstance(until, str) else tuple(filter(None, until))
        drawn = bool(options.get("do_sample", options.get("temperature", 0) > 0))
        sampling = generate.Sampling(
            float(options.get("temperature", 1.0)) if drawn else 0.0,
            int(options.get("top_k", 0)),
            float(options.get("top_p", 1.0)),
        )
        return (until, sampling), max(1, int(options.get("max_gen_toks", _MAX_GENERATED)))

    def _generated(
        self, part: Sequence[tuple[int, list[int]]], until: Any, sampling: Any, most: int
    ) -> list[str]:
        texts, ids = [""] * len(part), [[] for _ in part]  # type: ignore[var-annotated]
        going = set(range(len(part)))
        tokens = self._generator(
            [context for _, context in part],
            most,
            sampling,
            [number for number, _ in part],
            self._longest,
        )
        for drawn in tokens:
            for row in sorted(going):
                if drawn[row] == self.eot_token_id:
                    going.remove(row)
                    continue
                ids[row].append(int(drawn[row]))
                texts[row] = self._tokens.decode(ids[row])
                ends = [texts[row].find(stop) for stop in until if stop in texts[row]]
                if ends:
                    texts[row] = texts[row][: min(ends)]
                    going.remove(row)
            if not going:
                break
        return texts
