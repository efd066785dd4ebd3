"""What a container begins with: a new one with the values of the replica that comes first, and the model of a later run
with what an earlier one has left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.central.client.server_view import ServerView
from paceline.central.client.whole_tensors import WholeTensors
from paceline.central.messages import replies, requests
from paceline.central.messages.connection import Connection
from paceline.central.messages.tensor_bytes import bytes_of, entries_of
from paceline.central.tables.embedding import Lookup
from paceline.net.frames import Channel
from paceline.optim.models import own_state

Named = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class InitialValues:
    """Gives servers one replica's values."""

    model: nn.Module
    optimizer: Optimizer
    parameters: Mapping[str, torch.Tensor]
    buffers: Named
    frozen: Named  # parameters that are not trained
    container: str

    def fill(self, views: Sequence[ServerView], tables: Sequence[Lookup], whole: WholeTensors) -> None:
        """Give all servers this replica's values."""
        for number, view in enumerate(views):
            is_chief = number == 0
            extras = [*self.buffers, *self.frozen] if is_chief else []
            body = [bytes_of(whole.flat(number, self.parameters)), *(bytes_of(tensor) for _, tensor in extras)]
            request = requests.Fill(
                container=self.container,
                buffers=entries_of(self.buffers) if is_chief else [],
                frozen=entries_of(self.frozen) if is_chief else [],
                keys=self._keys() if is_chief else [],
            )
            view.connection.call(request, replies.Done, body=lambda body=body: body)  # type: ignore[misc]
        # What the user's optimizer holds from the start, as Adagrad does.
        given = self.optimizer.state
        states = {name: dict(given[own]) for name, own in self.parameters.items() if given.get(own)}
        if states:
            whole.restore(self.parameters, states)
        for lookup in tables:
            if not lookup.module.weight.is_meta:
                whole.put_rows(lookup.number, "", lookup.module.weight.detach())

    def _keys(self) -> list[tuple[str, str]]:
        """Return the keys of the model's state_dict, and which tensor each is: a tied one has several."""
        own = own_state(self.model)
        names = {id(tensor): name for name, tensor in (*own.named_buffers(), *own.named_parameters())}
        held = own.state_dict(keep_vars=True).items()
        return [(key, names[id(value)]) for key, value in held if id(value) in names]

    def take_what_is_not_trained(self, chief: Connection) -> None:
        """Take what an earlier run has left, also where nothing is trained."""
        for frozen, tensors in ((False, self.buffers), (True, self.frozen)):

            def read(channel: Channel[replies.Reply], length: int, tensors: Named = tensors) -> None:
                if length:
                    receive(channel, tensors)

            chief.call(requests.ReadBuffers(container=self.container, frozen=frozen), replies.Tensors, read=read)


def receive(channel: Channel[replies.Reply], tensors: Named) -> None:
    """Receive new values of these, one after another."""
    for _, tensor in tensors:
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        channel.read_body(bytes_of(received))
        tensor.detach().copy_(received)
