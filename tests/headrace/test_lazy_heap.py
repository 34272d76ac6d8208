"""A lazy heap orders items by rank and keeps memory for the live ones only."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.lazy_heap import LazyHeap


def heap_of(**ranks):
    heap = LazyHeap()
    for key, rank in ranks.items():
        heap.push(key, rank, key)
    return heap


def num_entries(heap):
    return len(heap._heap) + len(heap._passed_over)


def test_the_smallest_rank_comes_first_and_of_equal_ranks_the_first_pushed():
    heap = heap_of(a=2, b=1, c=2, d=1)
    assert list(heap) == ["b", "d", "a", "c"]
    assert [heap.pop() for _ in range(4)] == ["b", "d", "a", "c"]
    assert (len(heap), heap.head()) == (0, None)


def test_items_of_equal_rank_are_never_compared():
    heap = LazyHeap()
    heap.push(1, 0, object())
    heap.push(2, 0, object())
    heap.pop()


def test_a_removed_item_never_surfaces_and_may_come_back_with_another_rank():
    heap = heap_of(a=1, b=2)
    assert heap.remove("a")
    assert not heap.remove("a")
    heap.push("a", 3, "a again")
    assert list(heap) == ["b", "a again"]
    assert [heap.pop(), heap.pop()] == ["b", "a again"]


def test_everything_up_to_a_rank_is_popped_in_order():
    heap = heap_of(a=5.0, b=3.0, c=9.0)
    assert heap.pop_through(2.9) == []
    assert heap.pop_through(5.0) == ["b", "a"]
    assert (heap.head().rank, len(heap)) == (9.0, 1)


def test_what_is_passed_over_keeps_its_place_among_equals():
    heap = heap_of(a=1, b=1, c=1)
    heap.pass_over()
    heap.pass_over()
    assert (heap.head().item, len(heap)) == ("c", 3)
    heap.remove("b")
    assert [entry.item for entry in heap.passed_over] == ["a"]
    heap.put_back()
    assert [heap.pop(), heap.pop(), len(heap)] == ["a", "c", 0]


def test_a_hundred_thousand_removed_items_take_no_memory():
    """Each is removed long before it would surface; one urgent item stays at the head."""
    heap = heap_of(first=-1)
    for key in range(100_000):
        heap.push(key, key, key)
        assert heap.remove(key)
        assert num_entries(heap) < 32
    assert list(heap) == ["first"]


def test_memory_follows_the_live_items_down():
    heap = LazyHeap()
    for key in range(100_000):
        heap.push(key, -key, key)
    for key in range(100_000):
        heap.remove(key)
        assert num_entries(heap) <= 2 * len(heap) + 16


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.integers(0, 9),
            st.sampled_from(["push", "push", "remove", "pop", "through", "pass", "back"]),
        )
    )
)
def test_equals_a_sorted_list(steps):
    heap, model, hidden = LazyHeap(), {}, set()
    for number, (key, rank, action) in enumerate(steps):
        visible = sorted((place, k) for k, place in model.items() if k not in hidden)
        if action == "push" and key not in model:
            model[key] = (rank, number)
            heap.push(key, rank, key)
        elif action == "remove":
            assert heap.remove(key) == (model.pop(key, None) is not None)
            hidden.discard(key)
        elif action == "pop" and visible:
            assert heap.pop() == visible[0][1]
            del model[visible[0][1]]
        elif action == "through":
            due = [k for place, k in visible if place[0] <= rank]
            assert heap.pop_through(rank) == due
            for k in due:
                del model[k]
        elif action == "pass" and visible:
            heap.pass_over()
            hidden.add(visible[0][1])
        elif action == "back":
            heap.put_back()
            hidden.clear()
        visible = sorted((place, k) for k, place in model.items() if k not in hidden)
        assert (heap.head().item if heap.head() else None) == (visible[0][1] if visible else None)
        assert (list(heap), len(heap)) == (sorted(model, key=model.get), len(model))
