"""Pages as a tree: match, commit, own and evict, over plain arrays; compiled by Numba.

Every page of the tree is a node: it holds up to ``page_size`` tokens that follow those of its
parent. Siblings stand in a treap, a binary tree ordered by their tokens whose shape is drawn by
a hash of the page id; no sibling's tokens are a prefix of another's, so the one that shares the
most tokens with a query is a neighbour of the query on the way down.

A page that the tree alone owns and that has no children may be evicted. Whoever holds a page
holds those before it, and whatever uses a page uses those before it. So under LRU a page that
is given back in the order of its last use, as nearly all are, is appended to a list, whether it
has children or not: its children stand there before it, and what is at the head has none. All
others stand in a heap once they have no children, the next to go on top.

Nothing here allocates, recurses or raises. The same structure as Python objects, which gives the
same answers to the page id, is `radixkv.cache.plain_tree`: what this does is to be read there.

The arrays; all rows are page ids, 0 is none, rows above ``counts[NUM_PAGES]`` are the roots of
namespaces, which have children alone:

    counts  [NOTED + NUM_NOTED] int64: totals and settings; what a call found besides what it
            returns; then digests of the runs that were evicted last
    links   [rows, NUM_LINKS] int32, by STATE to ROOT; of row 0: the ends of the list
    keys    [rows, 4] int64, by LAST_ACCESS to EXPIRES: what eviction policies look at; of a
            root: how many pages and tokens lie below it
    tokens  [rows * page_size] int32: the first FILL of each page
    queues  [2, num_pages + 2] int32: HEAP of pages that may be evicted, from 1; FREE pages, a stack
    query   [>= num_tokens] int32: a sequence from its beginning
    pages   [>= pages of a call] int64: page ids, read and written
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from radixkv_kernels.compile_cache import compile_lazily

# counts
NUM_PAGES, PAGE_SIZE, POLICY, NUM_FREE, NUM_EVICTABLE, NUM_QUEUED = range(6)
NUM_TOKENS, NUM_EVICTED, CLOCK, NUM_NOTES, EMPTIED = range(6, 11)
NEED, ROOM, END, INHERITED = range(11, 15)  # what a call found
NOTED, NUM_NOTED = 15, 4096

# links
STATE = 0  # owners, and IN_TREE if the tree is one of them; 0 is free
PARENT, CHILDREN, LEFT, RIGHT = 1, 2, 3, 4  # CHILDREN: the top of the treap of a page's children
ABOVE = 5  # in the treap: the sibling that has it on its left or right, or else the parent
FILL, DEPTH = 6, 7  # tokens in it; pages before it in its sequence
QUEUED = 8  # where in the heap; IN_LIST; 0 if in neither
OLDER, NEWER = 9, 10  # its neighbours in the list
STANDS_FOR = 11  # the tree's page that this duplicate of it holds
ROOT = 12  # of its namespace
NUM_LINKS = 13
IN_LIST = -1
LOOK_AHEAD = 8  # pages whose neighbours are fetched before they are evicted

# keys; POLICY names the column that is looked at first, LAST_ACCESS decides between equals
LAST_ACCESS, NUM_HITS, PRIORITY, EXPIRES = 0, 1, 2, 3
NUM_KEYS = 4
BELOW_PAGES, BELOW_TOKENS = 0, 1  # of a root
NO_PRIORITY = -(2**62)
EXPIRED = -(2**61)  # the priority of what has outlived its time
NEVER = -1  # as EXPIRES, which is the bits of a float64

HEAP, FREE = 0, 1  # queues

IN_TREE = 1 << 28
OWNERS = IN_TREE - 1
LONE = IN_TREE + 1  # the tree alone owns it


def _jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile what is called from Python."""
    return compile_lazily(function, error_model="numpy", _nrt=False)


def _inline(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile what is called from here alone, into its callers: a call costs more than it does."""
    return compile_lazily(
        function,
        error_model="numpy",
        _nrt=False,  # nothing is allocated, so no references need to be counted
        forceinline=True,
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
    )


@intrinsic
def _prefetch(_, links, row):
    """Let the processor fetch a row in the background."""

    def emit(context, builder, signature, arguments):
        links_type, row_type = signature.args
        array = context.make_array(links_type)(context, builder, arguments[0])
        at = context.cast(builder, arguments[1], row_type, types.intp)
        start = at.type(0)
        item = cgutils.get_item_pointer(context, builder, links_type, array, [at, start])
        address = builder.bitcast(item, cgutils.voidptr_t)
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [address.type], kind)
        builder.call(prefetch, [address, number(0), number(3), number(1)])  # to read, data
        return context.get_dummy_value()

    return types.void(links, row), emit


@_jit
def narrow(wide, tokens):
    """Copy token ids into int32; returns whether all of them are ids: from 0 to 2**31 - 1."""
    seen = 0
    for i in range(len(wide)):
        seen |= wide[i]
        tokens[i] = wide[i]
    return seen >> 31 == 0


@_jit
def copy_tokens(every, source, target, num_tokens):
    """Copy a page's first tokens in each of [num_layers, pages, heads, page_size, width] uint8."""
    for stored in every:
        num_layers, _, num_heads, _, width = stored.shape
        for layer in range(num_layers):
            for head in range(num_heads):
                for i in range(num_tokens):
                    for j in range(width):
                        stored[layer, target, head, i, j] = stored[layer, source, head, i, j]


# --- siblings --------------------------------------------------------------------------------


@_inline
def _shared(a, a_start, b, b_start, most):
    """How many tokens two runs share from their beginning; mostly all of them."""
    one, other = a[a_start : a_start + most], b[b_start : b_start + most]
    differ = 0
    for i in range(most):  # no way out of it: so many at a time as a vector holds
        differ |= one[i] ^ other[i]
    shared = most
    if differ:
        shared = 0
        while one[shared] == other[shared]:
            shared += 1
    return shared


def rank(page):
    """A hash of a page id: the larger stands higher in a treap."""
    mixed = (page * 0x9E3779B1) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x85EBCA77) & 0xFFFFFFFF
    return mixed ^ (mixed >> 13)


_rank = _inline(rank)


@_inline
def _sorts_before(counts, links, tokens, a, b):
    """Whether page ``a``'s tokens come before page ``b``'s."""
    page_size = counts[PAGE_SIZE]
    most = min(links[a, FILL], links[b, FILL])
    shared = _shared(tokens, a * page_size, tokens, b * page_size, most)
    if shared == most:
        return links[a, FILL] < links[b, FILL]
    return tokens[a * page_size + shared] < tokens[b * page_size + shared]


@_inline
def _add_child(counts, links, tokens, parent, page):
    """Put ``page`` among the children of ``parent``. O(log(children))."""
    holder, side = parent, CHILDREN
    at = links[holder, side]
    own = _rank(page)
    while at and _rank(at) >= own:
        holder, side = at, RIGHT if _sorts_before(counts, links, tokens, at, page) else LEFT
        at = links[holder, side]
    links[holder, side] = page
    links[page, ABOVE] = holder
    # What stood here is split into what comes before the page and what comes after it.
    left, left_side, right, right_side = page, LEFT, page, RIGHT
    while at:
        if _sorts_before(counts, links, tokens, at, page):
            links[left, left_side] = at
            links[at, ABOVE] = left
            left, left_side = at, RIGHT
            at = links[at, RIGHT]
        else:
            links[right, right_side] = at
            links[at, ABOVE] = right
            right, right_side = at, LEFT
            at = links[at, LEFT]
    links[left, left_side] = 0
    links[right, right_side] = 0


@_inline
def _remove_child(links, page):
    """Take ``page`` from among its siblings. O(1), expected: it is not searched for."""
    holder = links[page, ABOVE]
    if holder == links[page, PARENT]:
        side = CHILDREN
    else:
        side = LEFT if links[holder, LEFT] == page else RIGHT
    left, right = links[page, LEFT], links[page, RIGHT]
    while left and right:  # merged, the higher rank on top
        if _rank(left) >= _rank(right):
            top, inner = left, RIGHT
            left = links[left, RIGHT]
        else:
            top, inner = right, LEFT
            right = links[right, LEFT]
        links[holder, side] = top
        links[top, ABOVE] = holder
        holder, side = top, inner
    rest = left or right
    links[holder, side] = rest
    if rest:
        links[rest, ABOVE] = holder


@_inline
def _closest(counts, links, tokens, parent, query, start, width):
    """The child of ``parent`` that shares most with ``query[start : start + width]``.

    Of several, the last that sorts before the query, or else the first after it.

    Returns:
        the page, or 0; how many tokens it shares.
    """
    page_size = counts[PAGE_SIZE]
    page = links[parent, CHILDREN]
    before = before_shared = after = after_shared = 0
    while page:
        fill = links[page, FILL]
        most = min(width, fill)
        shared = _shared(tokens, page * page_size, query, start, most)
        if shared == width == fill:
            return page, shared
        if shared == width or (
            shared < most and tokens[page * page_size + shared] > query[start + shared]
        ):
            after, after_shared = page, shared
            page = links[page, LEFT]
        else:
            before, before_shared = page, shared
            page = links[page, RIGHT]
    if before_shared and before_shared >= after_shared:
        return before, before_shared
    if after_shared:
        return after, after_shared
    return 0, 0


# --- owners ----------------------------------------------------------------------------------


@_inline
def _goes_before(counts, keys, a, b):
    """Whether page ``a`` is evicted before page ``b``."""
    column = counts[POLICY]
    if keys[a, column] != keys[b, column]:
        return keys[a, column] < keys[b, column]
    return keys[a, LAST_ACCESS] < keys[b, LAST_ACCESS]


@_inline
def _sift(counts, links, keys, queues, at):
    """Move the page at ``at`` of the heap, whose key has changed, to its place."""
    page = queues[HEAP, at]
    while at > 1 and _goes_before(counts, keys, page, queues[HEAP, at // 2]):
        queues[HEAP, at] = queues[HEAP, at // 2]
        links[queues[HEAP, at], QUEUED] = at
        at //= 2
    size = counts[NUM_QUEUED]
    while 2 * at <= size:
        below = 2 * at
        if below < size and _goes_before(
            counts, keys, queues[HEAP, below + 1], queues[HEAP, below]
        ):
            below += 1
        if not _goes_before(counts, keys, queues[HEAP, below], page):
            break
        queues[HEAP, at] = queues[HEAP, below]
        links[queues[HEAP, at], QUEUED] = at
        at = below
    queues[HEAP, at] = page
    links[page, QUEUED] = at


@_inline
def _append(links, page):
    """Put a page at the end of the list, where the newest stands."""
    newest = links[0, OLDER]
    links[newest, NEWER] = links[0, OLDER] = page
    links[page, OLDER], links[page, NEWER] = newest, 0
    links[page, QUEUED] = IN_LIST


@_inline
def _queue(counts, links, keys, queues, page):
    """Let a page be evicted that the tree alone owns, in its turn."""
    newest = links[0, OLDER]
    if counts[POLICY] == LAST_ACCESS and (
        not newest
        or links[newest, PARENT] == page
        or keys[newest, LAST_ACCESS] < keys[page, LAST_ACCESS]
    ):
        _append(links, page)
    elif not links[page, CHILDREN]:
        counts[NUM_QUEUED] += 1
        queues[HEAP, counts[NUM_QUEUED]] = page
        _sift(counts, links, keys, queues, counts[NUM_QUEUED])


@_inline
def _unqueue(counts, links, keys, queues, page):
    at = links[page, QUEUED]
    links[page, QUEUED] = 0
    if at == IN_LIST:
        older, newer = links[page, OLDER], links[page, NEWER]
        links[older, NEWER], links[newer, OLDER] = newer, older
    elif at:
        size = counts[NUM_QUEUED]
        counts[NUM_QUEUED] = size - 1
        if at != size:
            queues[HEAP, at] = queues[HEAP, size]
            _sift(counts, links, keys, queues, at)


@_inline
def _next_to_go(counts, links, keys, queues):
    """The page that is evicted next, or 0."""
    oldest = links[0, NEWER]
    if counts[NUM_QUEUED]:
        top = queues[HEAP, 1]
        # Of equals, that of the heap: it may be a child of the other, never its parent.
        if not oldest or not _goes_before(counts, keys, oldest, top):
            return top
    return oldest


@_inline
def _hold(counts, links, keys, queues, page):
    """Add an owner to a page that has one."""
    if links[page, STATE] == LONE:
        counts[NUM_EVICTABLE] -= 1
        _unqueue(counts, links, keys, queues, page)
    links[page, STATE] += 1


@_inline
def _free(counts, links, queues, page):
    """Make a page without owners free; returns the page that it held as a stand-in, or 0."""
    links[page, STATE] = 0
    queues[FREE, counts[NUM_FREE]] = page
    counts[NUM_FREE] += 1
    held = links[page, STANDS_FOR]
    links[page, STANDS_FOR] = 0
    return held


@_inline
def _drop(counts, links, keys, queues, page):
    """Take an owner other than the tree from a page."""
    while page:
        links[page, STATE] -= 1
        state = links[page, STATE]
        if state == LONE:
            counts[NUM_EVICTABLE] += 1
            _queue(counts, links, keys, queues, page)
        if state:
            return
        page = _free(counts, links, queues, page)


@_inline
def _stand_in(counts, links, keys, queues, page, tree_page):
    """Let a duplicate hold the tree's page for as long as it lives, in its holders' stead."""
    previous = links[page, STANDS_FOR]
    links[page, STANDS_FOR] = tree_page
    _hold(counts, links, keys, queues, tree_page)
    _drop(counts, links, keys, queues, previous)


@_jit
def hold(counts, links, keys, tokens, queues, pages, count):
    """Add an owner to each page."""
    for i in range(count):
        _hold(counts, links, keys, queues, pages[i])


@_jit
def drop(counts, links, keys, tokens, queues, pages, count):
    """Take an owner other than the tree from each page; those without one are free.

    From the last to the first, so that a run given back is handed out again in its order.
    """
    for i in range(count - 1, -1, -1):
        _drop(counts, links, keys, queues, pages[i])


@_jit
def stand_in(counts, links, keys, tokens, queues, page, tree_page):
    """See `_stand_in`."""
    _stand_in(counts, links, keys, queues, page, tree_page)


@_inline
def _allocate(counts, links, queues, pages, start, count):
    free = counts[NUM_FREE]
    for i in range(count):
        page = queues[FREE, free - 1 - i]
        links[page, STATE] = 1
        pages[start + i] = page
    counts[NUM_FREE] = free - count


@_jit
def allocate(counts, links, keys, tokens, queues, pages, count):
    """Take ``count`` free pages, each with one owner. There must be so many."""
    _allocate(counts, links, queues, pages, 0, count)


# --- the tree --------------------------------------------------------------------------------


@_jit
def digest(tokens, start, count, depth):
    """A hash of a page's tokens and its place: tells what was evicted, never what is there."""
    value = (depth + 1) << 31  # above all bits of a token, or they would make up for each other
    for i in range(start, start + count):
        value = ((value ^ tokens[i]) * 0x100000001B3) & 0xFFFFFFFFFFFFFFF
        value ^= value >> 29
    return value


@_inline
def _walk(counts, links, tokens, root, query, num_tokens, pages):
    """Follow whole pages from a root as far as they match; their ids go to ``pages``.

    Returns:
        how many pages match wholly; the page in which the match ends, or 0; tokens of it.
    """
    page_size = counts[PAGE_SIZE]
    row, at = root, 0
    while num_tokens > at * page_size:
        width = min(page_size, num_tokens - at * page_size)
        page, shared = _closest(counts, links, tokens, row, query, at * page_size, width)
        if shared < page_size:
            return at, page, shared
        pages[at] = page
        row = page
        at += 1
    return at, 0, 0


@_jit
def match(counts, links, keys, tokens, queues, root, query, num_tokens, pages):
    """The longest prefix of the query below a root; changes nothing. Its whole pages: ``pages``.

    Returns:
        its length in tokens; the page in which it ends, or 0.
    """
    at, partial, shared = _walk(counts, links, tokens, root, query, num_tokens, pages)
    return at * counts[PAGE_SIZE] + shared, partial


@_inline
def _touch(counts, links, keys, queues, page, priority, expires):
    keys[page, LAST_ACCESS] = counts[CLOCK]
    keys[page, NUM_HITS] += 1
    if priority != NO_PRIORITY and priority >= keys[page, PRIORITY]:
        keys[page, PRIORITY] = priority
        keys[page, EXPIRES] = expires
    at = links[page, QUEUED]
    if at == IN_LIST:
        _unqueue(counts, links, keys, queues, page)
        _append(links, page)
    elif at:
        _sift(counts, links, keys, queues, at)


@_jit
def touch(counts, links, keys, tokens, queues, pages, count):
    """Count pages of one path as used now; children come before parents in the list."""
    counts[CLOCK] += 1
    for i in range(count - 1, -1, -1):
        _touch(counts, links, keys, queues, pages[i], NO_PRIORITY, NEVER)


@_inline
def _link(counts, links, keys, tokens, root, parent, page, depth, query, start, width):
    """Make the tree an owner of a page and hang it below ``parent`` with its tokens."""
    base = page * counts[PAGE_SIZE]
    for i in range(width):
        tokens[base + i] = query[start + i]
    links[page, STATE] += LONE
    links[page, PARENT] = parent
    links[page, CHILDREN] = 0
    links[page, FILL] = width
    links[page, DEPTH] = depth
    links[page, ROOT] = root
    keys[root, BELOW_PAGES] += 1
    keys[root, BELOW_TOKENS] += width
    counts[NUM_TOKENS] += width
    _add_child(counts, links, tokens, parent, page)


@_inline
def _unlink(counts, links, keys, page):
    """Take a page without children out of the tree; who owns it is the caller's to say."""
    parent, root, fill = links[page, PARENT], links[page, ROOT], links[page, FILL]
    _remove_child(links, page)
    keys[root, BELOW_PAGES] -= 1
    keys[root, BELOW_TOKENS] -= fill
    counts[NUM_TOKENS] -= fill
    links[page, PARENT] = 0
    return parent


@_inline
def _leave(counts, links, keys, queues, page):
    """Take the tree from the owners of a page; one without another owner is free."""
    if links[page, STATE] == LONE:
        counts[NUM_EVICTABLE] -= 1
        _unqueue(counts, links, keys, queues, page)
    links[page, STATE] = (links[page, STATE] & OWNERS) - 1
    if not links[page, STATE]:
        _free(counts, links, queues, page)


@_inline
def _fetch_ahead(links, ahead, seen, upto):
    """Fetch the siblings of the next victims of the list; which is next, and how many were seen."""
    while seen < upto:
        for column in range(LEFT, ABOVE + 1):
            _prefetch(links, links[ahead, column])
        ahead = links[ahead, NEWER]
        seen += 1
    return ahead, seen


@_inline
def _evict(counts, links, keys, tokens, queues, num_pages):
    """Free up to ``num_pages`` pages, tails first, in the order of the policy.

    Returns:
        how many were freed. O(1) a page of the list, O(log(evictable)) one of the heap.
    """
    freed = seen = 0
    page = ahead = _next_to_go(counts, links, keys, queues)
    while page and freed < num_pages:
        ahead, seen = _fetch_ahead(links, ahead, seen, min(num_pages, freed + LOOK_AHEAD))
        _unqueue(counts, links, keys, queues, page)
        parent = _unlink(counts, links, keys, page)
        counts[NUM_EVICTABLE] -= 1
        _free(counts, links, queues, page)
        freed += 1
        if not links[parent, CHILDREN]:
            if parent > counts[NUM_PAGES]:
                links[parent, LEFT] = counts[EMPTIED]  # a chain of roots to be removed
                counts[EMPTIED] = parent
            elif links[parent, STATE] == LONE and not links[parent, QUEUED]:
                _queue(counts, links, keys, queues, parent)
        after = _next_to_go(counts, links, keys, queues)
        if after != parent or freed == num_pages:  # of a run, its beginning is remembered
            start = page * counts[PAGE_SIZE]
            counts[NOTED + counts[NUM_NOTES] % NUM_NOTED] = digest(
                tokens, start, links[page, FILL], links[page, DEPTH]
            )
            counts[NUM_NOTES] += 1
        page = after
    counts[NUM_EVICTED] += freed
    return freed


@_jit
def evict(counts, links, keys, tokens, queues, num_pages):
    """See `_evict`."""
    return _evict(counts, links, keys, tokens, queues, num_pages)


@_jit
def acquire(counts, links, keys, tokens, queues, root, query, num_query, num_pages, pages):
    """Match, hold what matched, take pages for the rest, evicting for them; all or nothing.

    Args:
        root: of the namespace, or 0 if it has none.
        num_query: tokens that are looked up.
        num_pages: pages that the whole sequence takes.
        pages: filled.
    Returns:
        tokens found; the page whose tokens go to the first new one, or 0; whether namespaces
        were emptied. Or -1, 0, False: ``counts[NEED]`` pages were asked for, ``counts[ROOM]``
        can be had.
    """
    at = partial = shared = 0
    if root:
        at, partial, shared = _walk(counts, links, tokens, root, query, num_query, pages)
    room = counts[NUM_FREE] + counts[NUM_EVICTABLE]
    for i in range(at):
        if links[pages[i], STATE] == LONE:
            room -= 1
    need = num_pages - at
    if need > room:
        counts[NEED], counts[ROOM] = need, room
        return -1, 0, False
    if at or partial:
        counts[CLOCK] += 1
        for i in range(at):
            _hold(counts, links, keys, queues, pages[i])
            _touch(counts, links, keys, queues, pages[i], NO_PRIORITY, NEVER)
        if partial:
            _touch(counts, links, keys, queues, partial, NO_PRIORITY, NEVER)
    if need > counts[NUM_FREE]:
        _evict(counts, links, keys, tokens, queues, need - counts[NUM_FREE])
    _allocate(counts, links, queues, pages, at, need)
    return at * counts[PAGE_SIZE] + shared, partial, counts[EMPTIED] != 0


@_jit
def commit(
    counts, links, keys, tokens, queues, root, query, num_tokens, own_last, pages, priority, expires
):
    """Make a sequence findable; what is in the tree already stays as it is.

    Args:
        num_tokens: of the query; at least 1.
        own_last: whether the last page may be given back in favour of the tree's.
        pages: its pages, all held by the caller, who is pointed at the tree's pages here.
        priority: or NO_PRIORITY; expires: or NEVER.
    Returns:
        how many pages were replaced. The tree's last page is in ``counts[END]``; one that took
        the place of another and its time, in ``counts[INHERITED]``, or 0.
    """
    page_size = counts[PAGE_SIZE]
    counts[CLOCK] += 1
    counts[INHERITED] = 0
    parent, depth, replaced = root, 0, 0
    while depth * page_size < num_tokens:
        start = depth * page_size
        width = min(page_size, num_tokens - start)
        mine = pages[depth]
        page, shared = mine, width
        # A full page of the tree that the caller holds there is its own: nothing to compare.
        full = width == page_size == links[mine, FILL]
        if not full or links[mine, STATE] < IN_TREE or links[mine, PARENT] != parent:
            page, shared = _closest(counts, links, tokens, parent, query, start, width)
        if shared == width:
            spare = links[mine, STATE] < IN_TREE and (width == page_size or own_last)
            if page != mine and spare:
                _hold(counts, links, keys, queues, page)
                if links[mine, STATE] > 1:
                    _stand_in(counts, links, keys, queues, mine, page)
                pages[depth] = page
                _drop(counts, links, keys, queues, mine)
                replaced += 1
        else:
            if page == mine and shared:  # the same page, of which more is published now
                _unlink(counts, links, keys, mine)
                links[mine, STATE] -= LONE
            elif page and links[page, FILL] == shared:  # mine takes the place of its beginning
                for column in range(NUM_KEYS):
                    keys[mine, column] = keys[page, column]
                if keys[mine, EXPIRES] != NEVER:
                    counts[INHERITED] = mine
                _unlink(counts, links, keys, page)
                _leave(counts, links, keys, queues, page)
            else:
                keys[mine, LAST_ACCESS] = keys[mine, NUM_HITS] = keys[mine, PRIORITY] = 0
                keys[mine, EXPIRES] = NEVER
            stood_for = links[mine, STANDS_FOR]
            links[mine, STANDS_FOR] = 0
            _link(counts, links, keys, tokens, root, parent, mine, depth, query, start, width)
            _drop(counts, links, keys, queues, stood_for)
            if page and page != mine and links[page, STATE] and not links[page, PARENT]:
                # The holders of the page whose place was taken keep what they hold findable.
                _stand_in(counts, links, keys, queues, page, mine)
            page = mine
        _touch(counts, links, keys, queues, page, priority, expires)
        parent = page
        depth += 1
    counts[END] = parent
    return replaced


@_jit
def expire(counts, links, keys, tokens, queues, pages, count, expires):
    """Let the priority of pages whose time this is fall to the smallest."""
    for i in range(count):
        page = pages[i]
        if links[page, STATE] >= IN_TREE and keys[page, EXPIRES] == expires:
            keys[page, PRIORITY], keys[page, EXPIRES] = EXPIRED, NEVER
            if links[page, QUEUED] > 0:
                _sift(counts, links, keys, queues, links[page, QUEUED])


@_jit
def clear(counts, links, keys, tokens, queues, root):
    """Take every page below a root from the tree; returns how many are free now.

    From the last sibling to the first, and what follows one before the next: the order in which
    pages are handed out again does not tell of the treap's shape.
    """
    before = counts[NUM_FREE]
    page = links[root, CHILDREN]
    links[root, CHILDREN] = 0
    keys[root, BELOW_PAGES] = keys[root, BELOW_TOKENS] = 0
    if page:
        links[page, PARENT] = 0
    while page:  # PARENT is the stack of pages still to be visited
        later = links[page, RIGHT]
        if later:  # they come first; the page stays on the stack
            links[page, RIGHT] = 0
            links[later, PARENT] = page
            page = later
            continue
        rest = links[page, PARENT]
        for side in (LEFT, CHILDREN):
            other = links[page, side]
            if other:
                links[other, PARENT] = rest
                rest = other
        links[page, CHILDREN] = links[page, LEFT] = links[page, PARENT] = 0
        counts[NUM_TOKENS] -= links[page, FILL]
        _leave(counts, links, keys, queues, page)
        page = rest
    return counts[NUM_FREE] - before
