"""An order of rows and columns in which factors of a sparse symmetric matrix have few entries.

That of approximate minimum degree (Amestoy, Davis and Duff, 1996) on a quotient graph: a pivot
becomes an element, the list of the variables that its elimination has joined, and takes the place
of the elements it was in itself. A variable that is in one element only, and has no other
neighbours, is eliminated with it. Variables are then put in the order in which a walk through the
elimination tree leaves them, which changes nothing but that columns with entries in the same rows
follow each other.
"""

from __future__ import annotations

import numpy as np

from dfwlayer.engines.compiled.kernels.dense import making

__all__ = ["elimination_order", "entries"]

VARIABLE, ELEMENT, GONE = 0, 1, 2
DENSE = 10.0  # times √N neighbours, and 16: with more a variable is eliminated last


@making
def entries(P, A, G):
    """[P Aᵀ Gᵀ; A 0 0; G 0 0] as rows, columns and values, and its diagonal.

    Matrices are given by rows (start, place, value). Of two entries that mirror each other there
    is one.
    """
    n, k, m = len(P[0]) - 1, len(A[0]) - 1, len(G[0]) - 1
    most = len(P[1]) + len(A[1]) + len(G[1])
    row, col, value = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most)
    diagonal = np.zeros(n + k + m)
    e = 0
    for part in range(3):
        begin, place, number = P if part == 0 else (A if part == 1 else G)
        first = 0 if part == 0 else (n if part == 1 else n + k)
        for i in range(len(begin) - 1):
            for p in range(begin[i], begin[i + 1]):
                j = place[p]
                if part > 0 or j > i:
                    row[e], col[e], value[e] = first + i, j, number[p]
                    e += 1
                elif j == i:
                    diagonal[i] += number[p]
    return row[:e], col[:e], value[:e], diagonal


@making
def _neighbours(P, A, G):
    """The graph of that matrix: where the neighbours of each row start, and these."""
    row, col, _, diagonal = entries(P, A, G)
    N = len(diagonal)
    start = np.zeros(N + 2, np.int64)
    for e in range(len(row)):
        start[row[e] + 2] += 1
        start[col[e] + 2] += 1
    for j in range(N):
        start[j + 2] += start[j + 1]
    place = np.empty(start[N + 1], np.int64)
    for e in range(len(row)):
        for one, other in ((row[e], col[e]), (col[e], row[e])):
            place[start[one + 1]] = other
            start[one + 1] += 1
    return start[: N + 1].copy(), place


@making
def _unlink(v, degree, head, after, before):
    """Take a variable out of the list of those with its degree."""
    if before[v] >= 0:
        after[before[v]] = after[v]
    else:
        head[degree[v]] = after[v]
    if after[v] >= 0:
        before[after[v]] = before[v]


@making
def _link(v, degree, head, after, before):
    """Put a variable into the list of those with its degree."""
    first = head[degree[v]]
    after[v], before[v] = first, -1
    if first >= 0:
        before[first] = v
    head[degree[v]] = v


@making
def _without_dense(start, place, state, first, length, lists):
    """Lists of neighbours without those that have too many, which are marked; where they end."""
    N = len(state)
    most = max(16.0, DENSE * np.sqrt(N))
    for v in range(N):
        state[v] = GONE if start[v + 1] - start[v] > most else VARIABLE
    end = 0
    for v in range(N):
        first[v] = end
        if state[v] == VARIABLE:
            for p in range(start[v], start[v + 1]):
                if state[place[p]] == VARIABLE:
                    lists[end] = place[p]
                    end += 1
        length[v] = end - first[v]
    return end


@making
def _shortened(v, p, stamp, tag, state, first, length, elements, mark, weight, lists):
    """Clean the list of a variable of the new element p, which joins it; the degree without p.

    Elements within p go into it.
    """
    a, out, degree = first[v], first[v], 0
    for t in range(a, a + elements[v]):
        e = lists[t]
        if state[e] == ELEMENT:
            outside = weight[e] - tag
            if outside > 0:
                lists[out] = e
                out += 1
                degree += outside
            else:
                state[e] = GONE
    edge = out
    for t in range(a + elements[v], a + length[v]):
        u = lists[t]
        if state[u] == VARIABLE and mark[u] != stamp:
            lists[out] = u
            out += 1
            degree += 1
    # p has a place, as the pivot itself, or an element that p has taken in, was in the list
    if out > edge:
        lists[out] = lists[edge]
    lists[edge] = lists[a]
    lists[a] = p
    elements[v], length[v] = edge + 1 - a, out + 1 - a
    return degree


@making
def _by_degree(start, place):
    """The order in which pivots are eliminated."""
    N = len(start) - 1
    state, mark = np.zeros(N, np.int64), np.full(N, -1, np.int64)
    first, length, elements = np.zeros(N, np.int64), np.zeros(N, np.int64), np.zeros(N, np.int64)
    after, before = np.empty(N, np.int64), np.empty(N, np.int64)
    head, weight = np.full(N + 1, -1, np.int64), np.zeros(N, np.int64)
    lists = np.empty(2 * len(place) + N + 1, np.int64)
    tail = _without_dense(start, place, state, first, length, lists)
    degree, order, count, live = length.copy(), np.empty(N, np.int64), 0, 0
    dense = state.copy()
    for v in range(N):
        if state[v] == VARIABLE:
            live += 1
            _link(v, degree, head, after, before)
    least, tag = 0, 1
    while count < live:
        while head[least] < 0:
            least += 1
        p = head[least]
        _unlink(p, degree, head, after, before)
        need = length[p]
        for t in range(first[p], first[p] + elements[p]):
            need += length[lists[t]]
        if tail + need > len(lists):
            longer = np.empty(2 * len(lists) + need, np.int64)
            for t in range(tail):
                longer[t] = lists[t]
            lists = longer
        # the variables that p is next to, or in an element with
        begin, stamp = tail, count
        mark[p] = stamp
        for t in range(first[p], first[p] + length[p]):
            e = lists[t]
            if t >= first[p] + elements[p]:
                if state[e] == VARIABLE and mark[e] != stamp:
                    mark[e] = stamp
                    lists[tail] = e
                    tail += 1
            elif state[e] == ELEMENT:
                for r in range(first[e], first[e] + length[e]):
                    v = lists[r]
                    if state[v] == VARIABLE and mark[v] != stamp:
                        mark[v] = stamp
                        lists[tail] = v
                        tail += 1
                state[e] = GONE
        state[p], first[p], elements[p] = ELEMENT, begin, 0
        order[count] = p
        count += 1
        # how many variables each other element has outside of p
        for t in range(begin, tail):
            v = lists[t]
            _unlink(v, degree, head, after, before)
            for r in range(first[v], first[v] + elements[v]):
                e = lists[r]
                if state[e] == ELEMENT:
                    weight[e] = weight[e] - 1 if weight[e] >= tag else length[e] + tag - 1
        size, kept = tail - begin, begin
        for t in range(begin, tail):
            v = lists[t]
            outside = _shortened(
                v, p, stamp, tag, state, first, length, elements, mark, weight, lists
            )
            if length[v] == 1:
                order[count] = v
                count += 1
                state[v] = GONE
            else:
                lists[kept] = v
                kept += 1
                degree[v] = min(degree[v] + size, outside)
        tail, length[p] = kept, kept - begin
        for t in range(begin, tail):
            v = lists[t]
            degree[v] = max(min(degree[v] + length[p] - 1, live - count - 1), 0)
            least = min(least, degree[v])
            _link(v, degree, head, after, before)
        tag += N + 1
    for v in range(N):
        if dense[v] == GONE:
            order[count] = v
            count += 1
    return order


@making
def _tree(start, place, order):
    """The elimination tree of a matrix in that order; −1 for the parent of a root."""
    N = len(order)
    at, parent, above = np.empty(N, np.int64), np.empty(N, np.int64), np.empty(N, np.int64)
    for j in range(N):
        at[order[j]] = j
    for j in range(N):
        parent[j] = above[j] = -1
        for p in range(start[order[j]], start[order[j] + 1]):
            i = at[place[p]]
            while 0 <= i < j:
                following = above[i]
                above[i] = j
                if following < 0:
                    parent[i] = j
                i = following
    return parent


@making
def elimination_order(P, A, G):
    """The variables of [P Aᵀ Gᵀ; A 0 0; G 0 0] as they are best eliminated (N,)."""
    start, place = _neighbours(P, A, G)
    order = _by_degree(start, place)
    N = len(order)
    parent = _tree(start, place, order)
    child, beside = np.full(N, -1, np.int64), np.empty(N, np.int64)
    for j in range(N - 1, -1, -1):
        if parent[j] >= 0:
            beside[j] = child[parent[j]]
            child[parent[j]] = j
    found, stack, count = np.empty(N, np.int64), np.empty(N, np.int64), 0
    for root in range(N):
        if parent[root] >= 0:
            continue
        stack[0], height = root, 1
        while height > 0:
            j = stack[height - 1]
            if child[j] >= 0:
                stack[height] = child[j]
                height += 1
                child[j] = beside[child[j]]
            else:
                found[count] = order[j]
                count += 1
                height -= 1
    return found
