/* The commit protocol of retryable ops, as built: one host, window 1. README.md says what is
 * checked, and how.
 *
 * An atomic or d_step is one step of a member. Between two of them anything may happen elsewhere,
 * and a member that takes no step for long is a frozen one. -DWITHOUT_n takes condition n of the
 * contract away, at the place where it acts. */

#ifndef N          /* give all six, or none */
#define N 3        /* members: 3 or 4 */
#define K 2        /* ops of the program */
#define WINDOW 1   /* ops that a member may have open at once: 1 or 2 */
#define CRASHES 1
#define TIMEOUTS 1 /* epochs that a member fails for no reason */
#define HURRIES 1  /* decisions by a member whose patience ends before a live one has reported */
#endif

/* A crash or a timeout ends one epoch; so does, at the end, the exit of a member that is through.
 * The decision on the last one is in the array too, which starts at 1. Spin checks the bound. */
#define EPOCHS (CRASHES + TIMEOUTS + 4)
#define BIT(m) (1 << (m))
#define ALL (BIT(N) - 1)
#define ADD(set, m) set = set | BIT(m)

/* Both print once per search and are no part of the state. */
#define EVENT(what) c_code { static int once; if (!once++) printf("event: " #what "\n"); }
#define CHECK(property, holds)                                                                    \
    if :: holds                                                                                   \
       :: else -> c_code { printf("violated: " #property "\n"); }; assert(false) fi
#ifdef ONLY_VALUES /* S3 and S4 serve S1 and S2: what happens to these without those? */
#define CHECK_MEANS(property, holds) skip
#else
#define CHECK_MEANS(property, holds) CHECK(property, holds)
#endif

typedef Report {
    byte finished; /* the last op of this epoch that it published */
    byte open;     /* the first op that it is in, 0 between ops */
    byte complete  /* bit s: the open op s is COMPLETE */
}
typedef Epoch {
    byte members;        /* the decision on the epoch before: 0 while there is none; */
    byte cut;            /* its verdict: PUBLISH up to this op of that epoch, REDO from there */
    byte hello;          /* who has connected, to build this epoch */
    byte entered[K + 1]; /* who has entered op s */
    bit failed;          /* somebody has stopped its attempts */
    byte reported;       /* whose reports are in the registry */
    Report report[N];
    bit acted, built;    /* for S3 and S4: somebody has read the decision; has built the epoch, */
    byte base            /* with so many ops before its first one */
}
typedef Inbox {
    byte epoch;       /* takes DONEs of this epoch, 0: of none, the attempts are stopped, */
    byte finished;    /* and of the ops after this one */
    byte done[WINDOW] /* who has sent it, for each open op */
}
Epoch ep[EPOCHS];
Inbox inbox[N];
byte gone; /* crashed, exited or excluded: takes no more steps, and peers can see it */
byte crashes, timeouts, hurries; /* still to come */
byte value_epoch[K + 1], value_members[K + 1]; /* for S1 and S2: what was published first */
byte i, k, redo, all; /* within one step; 0 between steps */

#define SLOT(s) ((s) % WINDOW) /* ops s and s + WINDOW are never open together */
#define COMPLETE(s) (scratch[SLOT(s)] != 0)
#define DONE(r, s) inbox[r].done[SLOT(s)]
#define IN_OP (called > finished)
#define SEES_A_FAILURE ((gone & group) != 0 || ep[e].failed)

/* The data phase ends, as everybody's input is there; COMPLETE precedes the first DONE. */
#define DATA_PHASE(s)                                                                             \
    d_step {                                                                                      \
        s <= called && !COMPLETE(s) && (ep[e].entered[s] & group) == group ->                     \
        scratch[SLOT(s)] = e;                                                                     \
        ADD(DONE(me, s), me);                                                                     \
        if :: ep[e + 1].members != 0 -> EVENT(complete_after_the_decision) :: else fi;            \
        printf("%d completes op %d of epoch %d\n", me, s, e)                                      \
    }

/* A DONE arrives at r: in any order, and if its sender dies, perhaps at some only. To send and to
 * arrive is one step: r need not act on it soon, and drops by its tag what comes too late. */
#define OWES(s, r)                                                                                \
    (COMPLETE(s) && (group & BIT(r) & ~gone) != 0 && inbox[r].epoch == e &&                       \
     inbox[r].finished < s && (DONE(r, s) & BIT(me)) == 0)
#define SEND_DONE(s, r) d_step { s <= called && OWES(s, r) -> ADD(DONE(r, s), me) }
#if N > 3
#define OWES_ANY(s) (OWES(s, 0) || OWES(s, 1) || OWES(s, 2) || OWES(s, 3))
#define SEND_DONES(s) SEND_DONE(s, 0) :: SEND_DONE(s, 1) :: SEND_DONE(s, 2) :: SEND_DONE(s, 3)
#else
#define OWES_ANY(s) (OWES(s, 0) || OWES(s, 1) || OWES(s, 2))
#define SEND_DONES(s) SEND_DONE(s, 0) :: SEND_DONE(s, 1) :: SEND_DONE(s, 2)
#endif
#define HAS_ALL_DONE(s)                                                                           \
    (s <= called && COMPLETE(s) && (DONE(me, s) & group) == group && !OWES_ANY(s))

inline publish(s) /* copies the scratch of op s to the user's tensor */
{
    printf("%d publishes op %d of the program: the value of epoch %d, members %d\n", me, base + s,
           scratch[SLOT(s)], group);
    CHECK(S1, COMPLETE(s));
    if
    :: value_epoch[base + s] == 0 ->
        value_epoch[base + s] = scratch[SLOT(s)];
        value_members[base + s] = group
    :: else ->
        CHECK(S1, value_epoch[base + s] == scratch[SLOT(s)]);
        CHECK(S2, value_members[base + s] == group)
    fi;
    scratch[SLOT(s)] = 0
}

inline close(m)
{
    inbox[m].epoch = 0;
    inbox[m].finished = 0;
    for (i : 0 .. WINDOW - 1) { inbox[m].done[i] = 0 }
    i = 0
}

inline stop() /* no COMPLETE, no DONE and no publish in this epoch from here on */
{
    if :: SEES_A_FAILURE :: else -> timeouts--; EVENT(timeout) fi;
    ep[e].failed = 1;
    close(me);
    printf("%d stops its attempts in epoch %d\n", me, e)
}

#ifdef WITHOUT_1B /* COMPLETE is recorded after the last DONE */
#define RECORDED(s) (COMPLETE(s) && !OWES_ANY(s))
#else
#define RECORDED(s) COMPLETE(s)
#endif
inline post_report()
{
    ep[e].report[me].finished = finished;
    ep[e].report[me].open = (IN_OP -> finished + 1 : 0);
    for (i : finished + 1 .. called) {
        if :: RECORDED(i) -> ADD(ep[e].report[me].complete, i) :: else fi
    }
    i = 0;
    ADD(ep[e].reported, me);
    printf("%d reports on epoch %d: finished %d, open %d, complete %d\n", me, e, finished,
           ep[e].report[me].open, ep[e].report[me].complete)
}

#ifdef WITHOUT_3 /* where there is no report on this epoch, one on the epoch before will do */
#define REPORTED (ep[e].reported | ep[e - 1].reported)
#define REPORT(m) ep[((ep[e].reported & BIT(m)) -> e : e - 1)].report[m]
#else
#define REPORTED ep[e].reported
#define REPORT(m) ep[e].report[m]
#endif
#if defined(WITHOUT_6) || defined(WITHOUT_6B) /* asks who was excluded before, too */
#define ASKED ALL
#define MEMBER ((ep[e].members & BIT(me)) != 0)
#else
#define ASKED group
#define MEMBER true
#endif

/* Reads the reports one by one. One that is just being written may be missed: this matters where
 * its writer dies then. To leave out a live member is to lose patience. */
#define MAY_MISS(m) ((ASKED & BIT(m) & ~gone) == 0 || hurries > 0)
inline look()
{
    seen = BIT(me);
    i = 0;
    do
    :: i < N && (REPORTED & ASKED & BIT(i)) -> ADD(seen, i); i++
    :: i < N && i != me && MAY_MISS(i) -> i++
    :: i == N -> i = 0; break
    od;
    if :: (group & ~seen & ~gone) != 0 -> hurries--; EVENT(hurry) :: else fi
}

/* On the reports seen: PUBLISH the ops below `redo`. With window 1 that is at most op k. */
#ifdef WITHOUT_2
#define PUBLISHED(m, s) false
#else
#define PUBLISHED(m, s) (REPORT(m).finished >= s)
#endif
inline verdict()
{
    k = K + 1; /* the smallest open op */
    for (i : 0 .. N - 1) {
        if
        :: (seen & BIT(i)) && REPORT(i).open != 0 && REPORT(i).open < k -> k = REPORT(i).open
        :: else
        fi
    }
    if :: k > K -> k = 1; EVENT(nobody_in_an_op) :: else fi;
    redo = k;
    do
    :: k <= K ->
        all = 1;
#ifdef TEMPTING /* redo unless somebody is known to have published */
        all = 0;
        for (i : 0 .. N - 1) { all = all || ((seen & BIT(i)) && PUBLISHED(i, k)) }
#endif
        for (i : 0 .. N - 1) {
            all = all && (!(seen & BIT(i)) || (REPORT(i).complete & BIT(k)) || PUBLISHED(i, k))
        }
        k++;
        if
        :: all -> redo = k
#ifdef WITHOUT_9C /* cuts after the first open op, whatever there is of the next */
            ; break
#endif
        :: else
#ifndef WITHOUT_9B /* cuts at the first op that is not all COMPLETE */
            -> break
#endif
        fi
    :: else -> break
    od
}

inline propose()
{
    if
#ifndef WITHOUT_5 /* compare-and-set, not a blind write */
    :: ep[e + 1].members != 0 -> EVENT(another_proposal_was_first)
#endif
    :: else ->
        verdict();
        CHECK_MEANS(S3, !ep[e + 1].acted
                        || (ep[e + 1].members == seen && ep[e + 1].cut == redo - 1));
        ep[e + 1].members = seen;
#ifdef WITHOUT_3B /* takes in who has not reported on this epoch */
        ep[e + 1].members = group & ~gone;
#endif
        ep[e + 1].cut = redo - 1;
        printf("%d decides epoch %d: members %d, publish up to op %d of epoch %d\n", me, e + 1,
               ep[e + 1].members, redo - 1, e)
    fi;
    seen = 0; i = 0; k = 0; redo = 0; all = 0
}

inline renumber() { base = base + finished; called = called - finished; finished = 0; e++ }

inline adopt() /* the decision on e, as one of the members of e + 1 */
{
    for (k : finished + 1 .. ep[e + 1].cut) {
        finished++;
        publish(finished);
        EVENT(published_by_verdict)
    }
    if
    :: IN_OP && COMPLETE(finished + 1) -> EVENT(redo_of_a_complete)
    :: IN_OP && !COMPLETE(finished + 1) -> EVENT(redo_of_an_incomplete)
    :: else -> EVENT(next_epoch_between_ops)
    fi;
#ifndef WITHOUT_4 /* a redo starts without COMPLETE */
    for (i : 0 .. WINDOW - 1) { scratch[i] = 0 }
#endif
    i = 0; k = 0;
    renumber();
    group = ep[e].members
}

proctype Member(byte me)
{
    byte e = 1;           /* the epoch that it is in, and */
    byte group = ALL;     /* its members; */
    byte base;            /* op s of this epoch is op base + s of the program; */
    byte finished;        /* the last op of this epoch that it published, and */
    byte called;          /* the last that it called */
    byte scratch[WINDOW]; /* the epoch of what is in it, 0: not COMPLETE */
    byte seen;            /* whose reports it has read */
#ifdef WITHOUT_8
    byte dropped;         /* whose connections came before it was in e */
#else
#define dropped 0
#endif
    {
attempt:
    do
    :: base + finished == K -> goto through
    :: atomic {
        called < finished + WINDOW && base + called < K ->
        called++;
        if
        :: ep[e].failed -> EVENT(learnt_between_ops); d_step { close(me) }; goto stopped
        :: ADD(ep[e].entered[called], me)
        fi
       }
    :: DATA_PHASE(finished + 1)
    :: SEND_DONES(finished + 1)
#if WINDOW > 1
    :: DATA_PHASE(finished + 2)
    :: SEND_DONES(finished + 2)
#endif
#ifdef WITHOUT_9 /* publishes out of order */
    :: d_step { HAS_ALL_DONE(finished + 2) -> publish(finished + 2) }
#endif
    :: d_step { /* against stop() too */
        HAS_ALL_DONE(finished + 1) ->
        finished++;
        publish(finished);
        if
        :: ep[e + 1].members != 0 && !(ep[e + 1].members & BIT(me)) ->
            EVENT(published_while_excluded)
        :: else -> EVENT(published_by_done)
        fi;
        inbox[me].finished = finished;
        DONE(me, finished) = 0
       }
    :: atomic {
        IN_OP && (SEES_A_FAILURE || timeouts > 0) ->
#ifdef WITHOUT_1 /* reads the record and reports first, and stops later */
        if :: !(ep[e].reported & BIT(me)) -> d_step { post_report() }; goto attempt :: else fi;
#endif
        d_step { stop() };
        goto stopped
       }
    od;
stopped:
    if
    :: d_step { !(ep[e].reported & BIT(me)) -> post_report() }
    :: else
    fi;
    if
    :: ep[e + 1].members != 0
    :: atomic {
        MEMBER && ep[e + 1].members == 0 &&
        ((group & ~REPORTED & ~gone) == 0 || hurries > 0) -> look()
       };
       d_step { propose() }
    fi;
    atomic { /* reads the decision on its epoch, and acts on it */
        CHECK_MEANS(S3, (ep[e + 1].members & ~group) == 0);
        ep[e + 1].acted = 1;
        if
        :: ep[e + 1].members & BIT(me) ->
            d_step { adopt() };
            if :: base == K -> goto through :: else fi
        :: else -> /* its open op fails: "excluded, outcome unknown" */
            EVENT(excluded);
            printf("%d is excluded from epoch %d\n", me, e + 1);
#ifdef WITHOUT_7 /* publishes what is merely COMPLETE */
            if :: COMPLETE(finished + 1) -> publish(finished + 1) :: else fi;
#endif
#ifdef WITHOUT_6B /* comes back with no record, and is asked */
            scratch[0] = 0;
#endif
#if defined(WITHOUT_6) || defined(WITHOUT_6B) /* comes back with its old record, and is asked */
            renumber();
            goto stopped
#else
            ADD(gone, me)
#endif
        fi
    };
    atomic { /* builds: connects to all, waits for all */
#ifdef WITHOUT_8
        dropped = ep[e].hello;
#endif
        ADD(ep[e].hello, me)
    };
    if
    :: atomic {
        (group & ~(ep[e].hello & ~dropped)) == 0 ->
        CHECK_MEANS(S4, !ep[e].built || ep[e].base == base);
        d_step {
            ep[e].built = 1;
            ep[e].base = base;
            inbox[me].epoch = e;
            for (i : 1 .. called) { ADD(ep[e].entered[i], me) }
            i = 0
        };
        goto attempt
       }
    :: atomic {
        SEES_A_FAILURE || timeouts > 0 ->
        if :: ep[e].built -> EVENT(build_failed_here_only) :: else -> EVENT(build_failed) fi;
        d_step { stop() };
        goto stopped
       }
    fi;
through:
#ifdef LINGER /* calls no further op, and does not exit */
end_linger:
    false;
#endif
    atomic { CHECK(T, base + finished == K); ADD(gone, me) }
    } unless { gone & BIT(me) }
}

#define IN_STEP(m, r) (inbox[m].epoch == inbox[r].epoch && inbox[m].finished == inbox[r].finished)
inline crash(m)
{
    if
    :: inbox[m].epoch != 0 && IN_STEP(m, (m + 1) % N) && IN_STEP(m, (m + 2) % N) &&
       ((inbox[(m + 1) % N].done[0] ^ inbox[(m + 2) % N].done[0]) & BIT(m)) ->
        EVENT(crash_amid_its_dones)
    :: else -> EVENT(crash)
    fi;
    printf("%d crashes\n", m);
    crashes--;
    ADD(gone, m);
    close(m)
}

init
{
    atomic {
        ep[1].members = ALL;
        ep[1].built = 1;
        /* Any smaller budget too: a member that one more fault would help on is stuck. */
        do :: crashes < CRASHES -> crashes++ :: break od;
        do :: timeouts < TIMEOUTS -> timeouts++ :: break od;
        do :: hurries < HURRIES -> hurries++ :: break od;
        for (k : 0 .. N - 1) { inbox[k].epoch = 1; run Member(k) }
        k = 0
    }
end:
    do
    :: d_step { crashes > 0 && !(gone & BIT(0)) -> crash(0) }
    :: d_step { crashes > 0 && !(gone & BIT(1)) -> crash(1) }
    :: d_step { crashes > 0 && !(gone & BIT(2)) -> crash(2) }
#if N > 3
    :: d_step { crashes > 0 && !(gone & BIT(3)) -> crash(3) }
#endif
    od
}
