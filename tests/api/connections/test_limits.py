"""How many connections are open: those that run, those that wait, and none beyond the bound."""

from rekindle.api.connections.limits import SPARE_CONNECTIONS, OpenConnections


class Connection:
    is_evicted = False

    def evict(self) -> None:
        self.is_evicted = True


def full(*, n_running: int) -> tuple[OpenConnections, list[Connection]]:
    connections = OpenConnections(2, receive_seconds=1.0, on_refused=lambda _status: None)
    opened = [Connection() for _ in range(2 + SPARE_CONNECTIONS)]
    for number, connection in enumerate(opened):
        assert connections.open(connection)
        if number < n_running:
            connections.run(connection)
    return connections, opened


def test_a_new_connection_takes_the_place_of_the_one_that_waits_longest() -> None:
    connections, opened = full(n_running=2)
    assert connections.open(Connection())
    assert [each.is_evicted for each in opened[:4]] == [False, False, True, False]


def test_where_every_connection_runs_a_new_one_is_refused() -> None:
    connections, opened = full(n_running=2 + SPARE_CONNECTIONS)
    assert not connections.open(Connection())
    assert not any(each.is_evicted for each in opened)
