"""`Rendezvous`: keeps this daemon's members of one run in the coordinator's groups.

Invariants: a member is in at most one group, and leaves it before it enters another; whatever fails, the member ends up
outside every group and joins again, with growing pauses. Nothing here delays a version: who is not in a group has the
store.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel

from app.p2p.errors import GroupOver, RankGone, lost_member
from app.p2p.member import Member, Seat
from app.p2p.messages import WHY_CHARS, GroupView, Joined, Offer, Report, VersionHead, View, member_id
from clients.errors import ClientError
from clients.http import AsyncSender, Call, Options, nothing, one
from engine.errors import DteError

log = logging.getLogger(__name__)
T = TypeVar("T")

WAIT_S = 5.0
FIRST_PAUSE_S = 0.2
LAST_PAUSE_S = 10.0
OFFER_S = 1.0
FASTEST_S = 0.5


class Rendezvous:
    """`daemon`: this process, to the coordinator. `directory`: where rosters are kept for the ranks to read."""

    def __init__(
        self,
        run: str,
        url: str,
        *,
        token: str | None,
        daemon: str,
        directory: Path,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.run = run
        self._daemon = daemon
        self._directory = directory
        self._http = AsyncSender(url, token=token, options=Options(attempts=2, answer_s=5.0), transport=transport)
        self._followers: dict[Member, asyncio.Task[None]] = {}
        self._names: dict[Member, str] = {}
        self._left: dict[Member, str] = {}
        self._entering: set[str] = set()
        self._known: set[str] = set()
        """Names under which members of this daemon have joined, and may be known to the coordinator still."""
        self._rosters: dict[str, asyncio.Future[tuple[Path, str]]] = {}
        self._changed = asyncio.Event()
        self._poll: asyncio.Task[None] | None = None
        self.view: View | None = None
        """The coordinator's view as it was last seen; None while it does not answer."""

    # --- members ----------------------------------------------------------------------------------------------------

    def add(self, member: Member) -> None:
        """Bring the member into groups from now on."""
        if self._poll is None:
            self._poll = asyncio.create_task(self._look(), name=f"p2p-{self.run}")
        self._followers[member] = asyncio.create_task(self._follow(member), name=f"p2p-member-{self.run}")

    async def remove(self, member: Member) -> None:
        """The member is gone. Idempotent."""
        task = self._followers.pop(member, None)
        if task is not None:
            task.cancel()
            name = self._names.pop(member, None)
            self._left.pop(member, None)
            if name is not None:
                # Said first: a rank that does not answer may keep the task for a while.
                with contextlib.suppress(ClientError, TimeoutError):
                    await self._send("DELETE", f"members/{name}", within_s=OFFER_S)
                    self._known.discard(name)
            await asyncio.wait([task])
        if not self._followers:
            await self._rest()

    async def _rest(self) -> None:
        """Ask for no more views: there is nobody here whom they concern."""
        poll, self._poll = self._poll, None
        if poll is not None:
            poll.cancel()
            await asyncio.wait([poll])
            self._see(None)

    async def aclose(self) -> None:
        """Take all members out and close."""
        await asyncio.gather(*(self.remove(m) for m in list(self._followers)))
        await self._rest()
        await self._http.aclose()

    async def offer(self, member: Member, offer: Offer) -> bool:
        """The member has read a version. False if the coordinator could not be told in time: then the version goes
        through the store."""
        name = self._names.get(member)
        if name is None:
            return False
        try:
            await self._send("PUT", f"members/{name}/offer", offer, within_s=OFFER_S)
        except (ClientError, TimeoutError) as error:
            log.info("run %s: version %d is not offered: %s", self.run, offer.head.version, error or "no answer")
            return False
        return True

    async def give_up(self, member: Member, why: str) -> None:
        """The member is of no use in its group: end that, and join the next."""
        group, name = self.seat_of(member), self._names.get(member)
        if group is not None and name is not None:
            with contextlib.suppress(ClientError, TimeoutError):
                report = Report(what="failed", why=why[:WHY_CHARS])
                await self._send("POST", f"groups/{group.id}/reports/{name}", report, within_s=OFFER_S)

    def seat_of(self, member: Member) -> GroupView | None:
        """The group the member is in, as last seen."""
        group = None if self.view is None else self.view.group
        return group if group is not None and self._names.get(member) in group.members else None

    async def refresh(self) -> View | None:
        """The view as it is now; None if the coordinator does not answer in time."""
        try:
            async with asyncio.timeout(OFFER_S):
                self._see(await self._get_view("", 0.0))
        except (ClientError, TimeoutError):
            return None
        return self.view

    async def until(self, reached: Callable[[], T | None]) -> T:
        """Wait for views until `reached` gives something."""
        while (found := reached()) is None:
            await self._changed.wait()
        return found

    # --- the coordinator's view -------------------------------------------------------------------------------------

    async def _get_view(self, tag: str, wait_s: float) -> View:
        params: dict[str, str | int | float] = {"daemon": self._daemon, "tag": tag, "wait": wait_s}
        return await self._http.send(Call("GET", f"/p2p/{self.run}", one(View), params=params, wait_s=wait_s))

    async def _look(self) -> None:
        silent, loop = False, asyncio.get_running_loop()
        while True:
            try:
                tag, asked_s = "" if self.view is None else self.view.tag, loop.time()
                self._see(await self._get_view(tag, WAIT_S))
                silent = False
                await self._take_out_ghosts()
                if self.view is not None and self.view.tag == tag and loop.time() - asked_s < FASTEST_S:
                    await asyncio.sleep(FASTEST_S)  # a coordinator that shuts down lets nobody wait
            except ClientError as error:
                if not silent:
                    log.warning("run %s: the P2P coordinator does not answer: %s", self.run, error)
                silent = True
                self._see(None)
                await asyncio.sleep(1.0)
            except Exception:
                log.exception("run %s: looking at the P2P group failed", self.run)
                await asyncio.sleep(1.0)

    async def _take_out_ghosts(self) -> None:
        """Members whose leave was lost: others would wait for them as long as this daemon lives."""
        if self.view is None:
            return
        present = self._entering.union(self._names.values())
        for name in sorted(self._known.intersection(self.view.members) - present):
            with contextlib.suppress(ClientError, TimeoutError):  # again with the next view
                await self._send("DELETE", f"members/{name}", within_s=OFFER_S)
                self._known.discard(name)

    def _see(self, view: View | None) -> None:
        known = self.view
        if view == known:
            return
        if view is not None and known is not None and view.instance == known.instance and view.seq < known.seq:
            return  # an answer that was overtaken
        self.view = view
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    def _group(self, group: str) -> GroupView:
        """The group as it is now; GroupOver if it is another one's turn. A silent coordinator ends no group."""
        if self.view is not None and (self.view.group is None or self.view.group.id != group):
            raise GroupOver(f"P2P group {group} is over.")
        if self.view is None or self.view.group is None:
            raise GroupOver("the P2P coordinator does not answer.")
        return self.view.group

    # --- one member -------------------------------------------------------------------------------------------------

    async def _follow(self, member: Member) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                name = await self._join(member)
                while True:
                    group = await self.until(lambda name=name: self._mine(member, name))  # type: ignore[misc]
                    await self._live(member, name, group)
                    pause_s = FIRST_PAUSE_S
            except GroupOver as error:
                log.info("run %s: %s: %s", self.run, self._names.get(member, "a member"), error)
            except DteError as error:
                log.warning("run %s: %s: %s", self.run, self._names.get(member, "a member"), error)
            except Exception:
                log.exception("run %s: a P2P member failed", self.run)
            self._names.pop(member, None)
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
            pause_s = min(LAST_PAUSE_S, 1.7 * pause_s)

    async def _join(self, member: Member) -> str:
        body = await member.join(self._daemon)
        name = member_id(body)
        self._known.add(name)
        self._entering.add(name)
        try:
            await self._http.send(Call("POST", f"/p2p/{self.run}/members", one(Joined), body=body))
            self._see(await self._get_view("", 0.0))
            self._names[member] = name
        finally:
            self._entering.discard(name)
        if (group := self.seat_of(member)) is not None and group.id == self._left.get(member):
            # Left while the coordinator was away, which still counts on it.
            await self.give_up(member, "it left the group")
        return name

    def _mine(self, member: Member, name: str) -> GroupView | None:
        """The group in which the member has a seat that it has not given up. GroupOver if the coordinator does not know
        the member any more: it has to join again."""
        view = self.view
        if view is None:
            return None
        if name not in view.members:
            raise GroupOver(f"{name} has to join again.")
        group = view.group
        if group is None or name not in group.members or group.id == self._left.get(member):
            return None
        return group

    async def _live(self, member: Member, name: str, group: GroupView) -> None:
        """A member's life in one group, to its end."""
        self._left[member] = group.id
        life = asyncio.ensure_future(self._take_part(member, name, group))
        over = asyncio.ensure_future(self._over(group.id))
        try:
            await asyncio.wait([life, over], return_when=asyncio.FIRST_COMPLETED)
            if not life.done():
                await member.leave(group.id)  # ends what is going on, so that the next group need not wait for it
                await asyncio.wait([life])
            error = GroupOver(f"P2P group {group.id} is over.") if life.cancelled() else life.exception()
            if error is not None:
                why = str(error) if isinstance(error, DteError) else f"{type(error).__name__}: {error}"
                if not isinstance(error, GroupOver) and not over.done():
                    with contextlib.suppress(ClientError, TimeoutError):
                        await self._report(
                            name, group.id, Report(what="failed", why=why[:WHY_CHARS], lost=lost_member(error))
                        )
                    raise error
                if not isinstance(error, DteError):
                    raise error
                log.info("run %s: %s left group %s: %s", self.run, name, group.id, why)
        finally:
            for task in (life, over):
                task.cancel()
            await asyncio.gather(life, over, return_exceptions=True)
            await member.leave(group.id)

    async def _over(self, group: str) -> None:
        """Return when the group has ended."""

        def ended() -> bool | None:
            view = self.view
            return True if view is not None and (view.group is None or view.group.id != group) else None

        await self.until(ended)

    async def _take_part(self, member: Member, name: str, group: GroupView) -> None:
        rank = group.members.index(name)
        if rank == 0:
            address = await member.host(group.id)
            await self._report(name, group.id, Report(what="hosting", address=address))
        else:
            address = await self.until(lambda: self._group(group.id).address or None)
        over = GroupOver(f"P2P group {group.id} is over.")
        path, sha256 = await _before(self._over(group.id), self._roster(group.id), over)
        side = rank if rank < group.senders else rank - group.senders
        seat = Seat(
            group=group.id,
            rank=rank,
            size=len(group.members),
            side=side,
            carrier=group.carrier,
            bucket_bytes=group.bucket_bytes,
            address=address,
            roster=path,
            roster_sha256=sha256,
        )
        plan = await member.connect(seat)
        await self._report(name, group.id, Report(what="connected", plan=plan))
        done = -1
        while True:
            head = await self._go(member, group.id, done)
            done = head.version
            try:
                moved = await member.exchange(seat, head)
            except Exception as error:
                member.settled(group.id, done, str(error) or type(error).__name__)
                raise
            member.settled(group.id, done, "")
            await self._report(
                name,
                group.id,
                Report(
                    what="done",
                    version=done,
                    entries=moved.entries,
                    bytes=moved.bytes,
                    ms=moved.ms,
                    pairs=moved.pairs,
                ),
            )

    async def _go(self, member: Member, group: str, after: int) -> VersionHead:
        """The next version to exchange. GroupOver when there will be none, RankGone if the rank's process ends."""
        return await _before(
            member.gone(),
            self.until(lambda: self._next_go(group, after)),
            RankGone("the rank's process has ended."),
        )

    def _next_go(self, group: str, after: int) -> VersionHead | None:
        view = self.view
        if view is None:
            return None  # the coordinator is away: nothing begins, and nothing has ended
        head = self._group(group).go
        return head if head is not None and head.version > after else None

    async def _roster(self, group: str) -> tuple[Path, str]:
        """The group's roster in a local file, downloaded once for all members of this daemon."""
        known = self._rosters.get(group)
        if known is None:
            known = asyncio.ensure_future(self._download(group))
            known.add_done_callback(lambda f: f.cancelled() or f.exception())  # whoever still waits for it gets it
            self._rosters = {group: known}
        return await asyncio.shield(known)

    async def _download(self, group: str) -> tuple[Path, str]:
        data = await self._http.send(
            Call("GET", f"/p2p/{self.run}/groups/{group}/roster", lambda response: response.content)
        )

        def write() -> tuple[Path, str]:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            for old in self._directory.glob("*.json"):
                old.unlink(missing_ok=True)
            path = self._directory / f"{group}.json"
            path.write_bytes(data)
            return path.absolute(), hashlib.sha256(data).hexdigest()

        return await asyncio.to_thread(write)

    # --- calls ------------------------------------------------------------------------------------------------------

    async def _report(self, name: str, group: str, report: Report) -> None:
        await self._send("POST", f"groups/{group}/reports/{name}", report)

    async def _send(
        self, method: str, path: str, body: BaseModel | None = None, *, within_s: float | None = None
    ) -> None:
        async with asyncio.timeout(within_s):
            await self._http.send(Call(method, f"/p2p/{self.run}/{path}", nothing, body=body))


async def _before(end: Coroutine[Any, Any, Any], wanted: Coroutine[Any, Any, T], error: DteError) -> T:
    """What `wanted` gives; raises `error` if `end` comes first."""
    ending, giving = asyncio.ensure_future(end), asyncio.ensure_future(wanted)
    try:
        await asyncio.wait([ending, giving], return_when=asyncio.FIRST_COMPLETED)
        if not giving.done():
            raise error
        return giving.result()
    finally:
        for task in (ending, giving):
            task.cancel()
        await asyncio.gather(ending, giving, return_exceptions=True)
