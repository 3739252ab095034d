/*
 * The key table: 64-bit keys, each with the set of its holders. What it is for, and what its calls mean,
 * stands in kv/key_table.py; this is the same in one pass per call.
 *
 *   64 parts by a key's top bits; in each, open addressing by its low bits with linear probing
 *   slot    key, then one word per 64 holders: bit h of word w set if holder 64 * w + h has the key
 *
 * Rules
 * - Keys are uniform already: no hashing. Key 0 marks a free slot; as an argument it is ignored.
 * - A slot is not freed before its part is rebuilt: a key that nobody holds keeps it. A part is rebuilt
 *   when more than 5/8 of its slots are used, into at least 16/7 slots a held key. So with up to 64
 *   holders a held key takes 26 to 74 bytes, and each rebuild moves 1/64 of the table.
 * - No call leaves the table half changed but for want of memory, which is reported; what was done before
 *   is counted.
 */
#include "moonpool_native.h"

#include <stdlib.h>
#include <string.h>

enum { NUM_PARTS = 64, PART_SHIFT = 58, MIN_SLOTS = 16, WORD_BITS = 64, AHEAD = 8 };

typedef struct {
    uint64_t *slots; /* num_slots of 1 + num_words words each */
    uint64_t num_slots; /* a power of two */
    uint64_t num_used;
    uint64_t num_held;
} part_t;

typedef struct {
    part_t parts[NUM_PARTS];
    int64_t num_words;
    uint64_t *alive; /* num_words: scratch of match */
} mp_key_table;

/* What a call changed: how many keys, and the sum of their mixes (keys_digest of kv/block_key.py). */
typedef struct {
    int64_t num_keys;
    uint64_t digest;
} mp_key_change;

static uint64_t mixed(uint64_t key)
{
    key += 0x9E3779B97F4A7C15u;
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9u;
    key = (key ^ (key >> 27)) * 0x94D049BB133111EBu;
    return key ^ (key >> 31);
}

static uint64_t *slot_at(const mp_key_table *table, const part_t *part, uint64_t index)
{
    return part->slots + index * (uint64_t)(1 + table->num_words);
}

/* The slot of the key, or the free one where it would be put. */
static uint64_t *find(const mp_key_table *table, const part_t *part, uint64_t key)
{
    uint64_t last = part->num_slots - 1;
    for (uint64_t index = key & last;; index = (index + 1) & last) {
        uint64_t *slot = slot_at(table, part, index);
        if (slot[0] == key || slot[0] == 0)
            return slot;
    }
}

static const part_t *part_of(const mp_key_table *table, uint64_t key)
{
    return &table->parts[key >> PART_SHIFT];
}

static void prefetch(const mp_key_table *table, const uint64_t *keys, int64_t num_keys, int64_t index)
{
    if (index < num_keys) {
        const part_t *part = part_of(table, keys[index]);
        __builtin_prefetch(slot_at(table, part, keys[index] & (part->num_slots - 1)));
    }
}

static int is_held(const mp_key_table *table, const uint64_t *slot)
{
    for (int64_t word = 1; word <= table->num_words; word++)
        if (slot[word])
            return 1;
    return 0;
}

/* What is held in `part`, in a new array for slots of `num_words`; 0, or -1 for want of memory. */
static int rebuilt(const mp_key_table *table, const part_t *part, int64_t num_words, part_t *fresh)
{
    mp_key_table wider = {.num_words = num_words};
    *fresh = (part_t){.num_slots = MIN_SLOTS, .num_used = part->num_held, .num_held = part->num_held};
    while (part->num_held * 16 > fresh->num_slots * 7)
        fresh->num_slots *= 2;
    fresh->slots = calloc(fresh->num_slots, sizeof(uint64_t) * (size_t)(1 + num_words));
    if (!fresh->slots)
        return -1;
    for (uint64_t index = 0; index < part->num_slots; index++) {
        const uint64_t *slot = slot_at(table, part, index);
        if (slot[0] && is_held(table, slot))
            memcpy(find(&wider, fresh, slot[0]), slot,
                   sizeof(uint64_t) * (size_t)(1 + table->num_words));
    }
    return 0;
}

/* Make room for one more key in the part; 0, or -1 for want of memory, having changed nothing. */
static int reserve(const mp_key_table *table, part_t *part)
{
    part_t fresh;
    if ((part->num_used + 1) * 8 <= part->num_slots * 5)
        return 0;
    if (rebuilt(table, part, table->num_words, &fresh))
        return -1;
    free(part->slots);
    *part = fresh;
    return 0;
}

/* Make room for holders up to `holder`; 0, or -1 for want of memory, having changed nothing. */
static int widen(mp_key_table *table, int64_t holder)
{
    mp_key_table wider = {.num_words = holder / WORD_BITS + 1};
    int done = 0;
    if (wider.num_words <= table->num_words)
        return 0;
    wider.alive = calloc((size_t)wider.num_words, sizeof(uint64_t));
    while (wider.alive && done < NUM_PARTS
           && !rebuilt(table, &table->parts[done], wider.num_words, &wider.parts[done]))
        done++;
    mp_key_table *loser = done == NUM_PARTS ? table : &wider;
    for (int index = 0; index < NUM_PARTS; index++)
        free(loser->parts[index].slots);
    free(loser->alive);
    if (done < NUM_PARTS)
        return -1;
    *table = wider;
    return 0;
}

MP_EXPORT void mp_key_table_destroy(mp_key_table *table)
{
    for (int index = 0; index < NUM_PARTS; index++)
        free(table->parts[index].slots);
    free(table->alive);
    free(table);
}

/* An empty table for 64 holders; NULL for want of memory. */
MP_EXPORT mp_key_table *mp_key_table_create(void)
{
    mp_key_table *table = calloc(1, sizeof *table);
    if (!table)
        return NULL;
    table->num_words = 1;
    table->alive = calloc(1, sizeof(uint64_t));
    int is_whole = table->alive != NULL;
    for (int index = 0; index < NUM_PARTS; index++) {
        table->parts[index].num_slots = MIN_SLOTS;
        table->parts[index].slots = calloc(MIN_SLOTS, 2 * sizeof(uint64_t));
        is_whole = is_whole && table->parts[index].slots;
    }
    if (is_whole)
        return table;
    mp_key_table_destroy(table);
    return NULL;
}

/* Note the holder for each key; 0, or -1 for want of memory. */
MP_EXPORT int64_t mp_key_table_add(mp_key_table *table, const uint64_t *keys, int64_t num_keys,
                                   int64_t holder, mp_key_change *change)
{
    *change = (mp_key_change){0};
    if (widen(table, holder))
        return -1;
    int64_t word = 1 + holder / WORD_BITS;
    uint64_t flag = (uint64_t)1 << holder % WORD_BITS;
    for (int64_t index = 0; index < num_keys; index++) {
        uint64_t key = keys[index];
        if (key == 0)
            continue;
        prefetch(table, keys, num_keys, index + AHEAD);
        part_t *part = &table->parts[key >> PART_SHIFT];
        uint64_t *slot = find(table, part, key);
        if (slot[0] == 0) {
            if (reserve(table, part))
                return -1;
            slot = find(table, part, key);
            slot[0] = key;
            part->num_used++;
        }
        if (slot[word] & flag)
            continue;
        part->num_held += !is_held(table, slot);
        slot[word] |= flag;
        change->num_keys++;
        change->digest += mixed(key);
    }
    return 0;
}

/* Forget the holder for each key. */
MP_EXPORT void mp_key_table_remove(mp_key_table *table, const uint64_t *keys, int64_t num_keys,
                                   int64_t holder, mp_key_change *change)
{
    *change = (mp_key_change){0};
    int64_t word = 1 + holder / WORD_BITS;
    uint64_t flag = (uint64_t)1 << holder % WORD_BITS;
    if (word > table->num_words)
        return;
    for (int64_t index = 0; index < num_keys; index++) {
        uint64_t key = keys[index];
        prefetch(table, keys, num_keys, index + AHEAD);
        part_t *part = &table->parts[key >> PART_SHIFT];
        uint64_t *slot = find(table, part, key);
        if (slot[0] == 0 || !(slot[word] & flag))
            continue;
        slot[word] &= ~flag;
        part->num_held -= !is_held(table, slot);
        change->num_keys++;
        change->digest += mixed(key);
    }
}

/* Forget the holder for every key. */
MP_EXPORT void mp_key_table_drop(mp_key_table *table, int64_t holder)
{
    int64_t word = 1 + holder / WORD_BITS;
    uint64_t flag = (uint64_t)1 << holder % WORD_BITS;
    if (word > table->num_words)
        return;
    for (int number = 0; number < NUM_PARTS; number++) {
        part_t *part = &table->parts[number];
        for (uint64_t index = 0; index < part->num_slots; index++) {
            uint64_t *slot = slot_at(table, part, index);
            if (slot[word] & flag) {
                slot[word] &= ~flag;
                part->num_held -= !is_held(table, slot);
            }
        }
    }
}

typedef struct {
    int32_t *holders;
    int32_t *lengths;
    int64_t num;
} runs_t;

static void tell(runs_t *runs, uint64_t mask, int64_t word, int64_t length)
{
    for (; mask; mask &= mask - 1) {
        runs->holders[runs->num] = (int32_t)(word * WORD_BITS + __builtin_ctzll(mask));
        runs->lengths[runs->num++] = (int32_t)length;
    }
}

/*
 * Per holder of keys[0], how many keys from the first on it has without a gap. `holders` and `lengths`
 * have room for 64 a word; returns how many there are.
 */
MP_EXPORT int64_t mp_key_table_runs(mp_key_table *table, const uint64_t *keys, int64_t num_keys,
                                    int32_t *holders, int32_t *lengths)
{
    runs_t runs = {.holders = holders, .lengths = lengths};
    int64_t num_words = table->num_words, index = 0;
    uint64_t *alive = table->alive, any = num_keys > 0;
    for (int64_t ahead = 0; ahead < AHEAD; ahead++)
        prefetch(table, keys, num_keys, ahead);
    memset(alive, 0xFF, sizeof(uint64_t) * (size_t)num_words);
    for (; any && index < num_keys; index++) {
        prefetch(table, keys, num_keys, index + AHEAD);
        const uint64_t *slot = find(table, part_of(table, keys[index]), keys[index]);
        any = 0;
        for (int64_t word = 0; word < num_words; word++) {
            if (index)
                tell(&runs, alive[word] & ~slot[1 + word], word, index);
            any |= alive[word] &= slot[1 + word];
        }
    }
    for (int64_t word = 0; any && word < num_words; word++)
        tell(&runs, alive[word], word, num_keys);
    return runs.num;
}

/* What the holder has, in no order: into `keys` unless it is NULL; returns how many. */
MP_EXPORT int64_t mp_key_table_keys_of(const mp_key_table *table, int64_t holder, uint64_t *keys)
{
    int64_t word = 1 + holder / WORD_BITS, num_keys = 0;
    uint64_t flag = (uint64_t)1 << holder % WORD_BITS;
    if (word > table->num_words)
        return 0;
    for (int number = 0; number < NUM_PARTS; number++) {
        const part_t *part = &table->parts[number];
        for (uint64_t index = 0; index < part->num_slots; index++) {
            const uint64_t *slot = slot_at(table, part, index);
            if (!(slot[word] & flag))
                continue;
            if (keys)
                keys[num_keys] = slot[0];
            num_keys++;
        }
    }
    return num_keys;
}

MP_EXPORT int64_t mp_key_table_num_words(const mp_key_table *table)
{
    return table->num_words;
}

MP_EXPORT int64_t mp_key_table_num_held(const mp_key_table *table)
{
    uint64_t num_held = 0;
    for (int number = 0; number < NUM_PARTS; number++)
        num_held += table->parts[number].num_held;
    return (int64_t)num_held;
}

MP_EXPORT int64_t mp_key_table_num_bytes(const mp_key_table *table)
{
    uint64_t num_slots = 0;
    for (int number = 0; number < NUM_PARTS; number++)
        num_slots += table->parts[number].num_slots;
    return (int64_t)(num_slots * sizeof(uint64_t)) * (1 + table->num_words);
}

/* 1 if every part agrees with its counts and every key is found where it stands. */
MP_EXPORT int64_t mp_key_table_is_valid(const mp_key_table *table)
{
    for (int number = 0; number < NUM_PARTS; number++) {
        const part_t *part = &table->parts[number];
        uint64_t num_used = 0, num_held = 0;
        for (uint64_t index = 0; index < part->num_slots; index++) {
            const uint64_t *slot = slot_at(table, part, index);
            if (slot[0] == 0 && is_held(table, slot))
                return 0;
            if (slot[0] && (part_of(table, slot[0]) != part || find(table, part, slot[0]) != slot))
                return 0;
            num_used += slot[0] != 0;
            num_held += is_held(table, slot);
        }
        if (num_used != part->num_used || num_held != part->num_held || num_used * 8 > part->num_slots * 5)
            return 0;
    }
    return 1;
}
