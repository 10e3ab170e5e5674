"""The front end of a virtual cluster: chooses homes as the live one does, and counts tokens.

It implements `workload.driver.Target`. Requests have no text and their tokens are not kept; what
the driver hears is which requests have one more token, and which have ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncmoe.errors import PeerLost, RequestError
from asyncmoe.frontend.admission import Admission, Booking, Overloaded, Unavailable
from asyncmoe.messages import Abort, Admit, Ended, Message, TokensOut, Unable
from asyncmoe.rank import Rank
from asyncmoe.sampling import SamplingParams
from asyncmoe.virtual.loop import Lane, VirtualLoop

if TYPE_CHECKING:
    from asyncmoe.workload.driver import Listener
    from asyncmoe.workload.workload import Workload


class VirtualFrontEnd:
    """One group's front end, beside its rank 0. All calls on the loop."""

    def __init__(self, rank: Rank, loop: VirtualLoop, lane: Lane) -> None:
        """`rank`: rank 0, which runs already, in `lane`."""
        config = rank.config
        self.now_s = loop.time
        self._loop, self._lane = loop, lane
        self.unable: dict[int, str] = {}  # home ranks that run no requests, and why
        self.lost: dict[int, str] = {}
        self.tokens: dict[int, list[int]] | None = None  # of each request, if they are to be kept
        self._rank = rank
        self._numbers = itertools.count()  # ids, in the order of submission
        self._request_of: dict[int, int] = {}  # by id: the driver's number
        self._id_of: dict[int, int] = {}
        self._bookings: dict[int, Booking] = {}  # by id
        self._listener: Listener | None = None
        self._admission = Admission(
            context=rank.spec.context,
            vocab=rank.spec.vocab,
            block_tokens=config.kv.block_tokens,
            kv_blocks_of=rank.kv_blocks_of,
            requests_per_home=config.engine.max_requests + config.engine.queue_requests,
        )
        rank.on_front_end = self._on_message
        rank.on_rank_lost = self._on_rank_lost

    @property
    def outstanding_tokens(self) -> int:
        """Prompt and answer tokens of all requests that have not ended."""
        return sum(home.tokens for home in self._admission.account().values())

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._bookings)

    def listen(self, listener: Listener) -> None:
        """See `Target`."""
        self._listener = listener

    def submit(self, request: int, workload: Workload) -> None:
        """See `Target`."""
        index = request % len(workload)
        self.begin(
            request,
            [0] * int(workload.prompt_tokens[index]),
            int(workload.output_tokens[index]),
            workload.decode_only,
        )

    def begin(
        self, request: int, prompt: Sequence[int], new_tokens: int, dummy_kv: bool = False
    ) -> None:
        """Run a greedy request of exactly `new_tokens` tokens, known as `request` to the caller.

        `dummy_kv`: see `Admit`. What goes wrong is told by `on_end`.
        """
        request_id = next(self._numbers)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=new_tokens)
        try:
            self._admission.check(prompt, params)
            booking = self._admission.book(len(prompt) + new_tokens)
        except (RequestError, Overloaded, Unavailable) as error:
            self._refuse(request, error)
            return
        self._bookings[request_id] = booking
        self._request_of[request_id], self._id_of[request] = request, request_id
        if self.tokens is not None:
            self.tokens[request] = []
        self._send(request_id, Admit(request_id, list(prompt), params.to_wire(), dummy_kv))

    def abort(self, request: int) -> None:
        """See `Target`."""
        request_id = self._id_of.get(request)
        if request_id is not None:
            self._send(request_id, Abort(request_id))

    def _send(self, request_id: int, message: Message) -> None:
        """To the request's home, from rank 0's lane: whoever calls may be in another one."""
        self._loop.call_soon(self._post, request_id, message, context=self._lane.context)

    def _post(self, request_id: int, message: Message) -> None:
        booking = self._bookings.get(request_id)
        if booking is None:
            return  # it ended meanwhile
        try:
            self._rank.send(booking.rank, message)
        except PeerLost:
            self._end(request_id, "failed")

    def _refuse(self, request: int, error: Exception) -> None:
        reasons = {RequestError: "refused", Overloaded: "overloaded"}
        if self._listener is not None:
            self._listener.on_end(request, reasons.get(type(error), "failed"))

    # ---- what the ranks say

    def _on_message(self, source: int, message: Message) -> None:
        match message:
            case TokensOut():
                self._on_tokens(message)
            case Ended():
                self._end(message.request_id, message.reason)
            case Unable():
                self.unable.setdefault(source, message.reason)
                self._admission.lose(source)

    def _on_tokens(self, message: TokensOut) -> None:
        known = self._request_of
        requests = [known[i] for i in message.request_ids if i in known]
        if self._listener is not None and requests:
            self._listener.on_tokens(requests, self.now_s())
        if self.tokens is not None:
            for request_id, token in zip(message.request_ids, message.tokens, strict=True):
                if request_id in known:
                    self.tokens[known[request_id]].append(token)
        for request_id, finish in zip(message.request_ids, message.finish, strict=True):
            if finish is not None:
                self._end(request_id, finish)

    def _on_rank_lost(self, rank: int, error: Exception) -> None:
        """Requests that are homed there have ended; what others hold of them is theirs to end."""
        self.lost.setdefault(rank, str(error))
        self._admission.lose(rank)
        for request_id in [i for i, each in self._bookings.items() if rank in (0, each.rank)]:
            self._end(request_id, "failed")

    def _end(self, request_id: int, reason: str) -> None:
        booking = self._bookings.pop(request_id, None)
        if booking is None:
            return
        self._admission.release(booking)
        request = self._request_of.pop(request_id)
        del self._id_of[request]
        if self._listener is not None:
            self._listener.on_end(request, reason)
