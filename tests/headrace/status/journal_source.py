"""A journal's source for tests, and the items that it hands out."""

from array import array

from headrace.status.records import Tokens, Update

NOW = 1_700_000_000.5


def update(state, name="r1", epoch=1, **known):
    known.setdefault("create_time_unix_s", NOW)
    return Update(request_id=name, state=state, epoch=epoch, time_unix_s=NOW, **known)


def piece(position, *tokens, name="r1", epoch=1, **more):
    more.setdefault("create_time_unix_s", NOW)
    ids = array("i", tokens).tobytes()
    return Tokens(request_id=name, epoch=epoch, position=position, token_ids=ids, **more)


class ListSource:
    """Hands out what it is given; knows the tokens of completions."""

    def __init__(self):
        self.items = []
        self.known = {}
        self.refused = []

    def take(self):
        items, self.items = self.items, []
        return items

    def again(self, request_id, epoch, position):
        if (tokens := self.known.get(request_id)) is None:
            return None
        return piece(position, *tokens[position:], name=request_id, epoch=epoch)

    def superseded(self, refused):
        self.refused += [(one.name, one.epoch, one.state) for one in refused]
