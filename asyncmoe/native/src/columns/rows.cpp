// The columns of an attention or head batch, collected from the tables of its home rank.
#include "rows.h"

#include <algorithm>
#include <vector>

namespace columns {
namespace {

// Decode steps, which are chunks of one row, stand before the longer ones; else the order stays.
std::vector<int64_t> in_order(const Column<const int64_t>& chunks,
                              const Column<const int64_t>& rows_of, py::ssize_t* singles) {
    std::vector<int64_t> order, longer;
    order.reserve(chunks.size);
    for (py::ssize_t i = 0; i < chunks.size; ++i) {
        const bool single = rows_of.at(chunks[i], "the chunk table") == 1;
        (single ? order : longer).push_back(chunks[i]);
    }
    *singles = static_cast<py::ssize_t>(order.size());
    order.insert(order.end(), longer.begin(), longer.end());
    return order;
}

}  // namespace

py::tuple gather_rows(py::handle chunks_array, py::handle rows_array, py::handle first_array,
                      py::handle request_array, const py::list& slots_of,
                      py::handle position_array, py::handle epoch_array, py::handle part_array,
                      py::handle pool_array, int64_t block_tokens) {
    const auto given = column<int64_t>(chunks_array, "chunks");
    const auto rows_of = column<int64_t>(rows_array, "rows");
    const auto first_slot = column<int64_t>(first_array, "first_slot");
    const auto request_of = column<int64_t>(request_array, "request");
    const auto position_of = column<int64_t>(position_array, "position");
    const auto epoch_of = column<uint32_t>(epoch_array, "epoch");
    const auto part_count_of = column<int64_t>(part_array, "part_count");
    const py::array pool_2d = array_of<int64_t>(pool_array, "table", 2);
    const auto* pool = static_cast<const int64_t*>(pool_2d.data());
    const py::ssize_t requests = pool_2d.shape(0), width = pool_2d.shape(1);
    check_size(first_slot.size, rows_of.size, "first_slot");
    check_size(request_of.size, rows_of.size, "request");
    check_size(epoch_of.size, position_of.size, "epoch");
    check_size(part_count_of.size, position_of.size, "part_count");

    py::ssize_t singles;
    const std::vector<int64_t> order = in_order(given, rows_of, &singles);
    const auto segments = static_cast<py::ssize_t>(order.size());
    int64_t total = 0;
    for (const int64_t chunk : order) total += rows_of[chunk];

    Fresh<int64_t> chunks(segments), counts(segments), query_start(segments + 1);
    Fresh<int64_t> context(segments), request(segments);
    Fresh<int64_t> slots(total), positions(total), cache_index(total), part_count(total);
    Fresh<uint32_t> epochs(total);
    int64_t row = 0, longest = 0;
    query_start[0] = 0;
    for (py::ssize_t i = 0; i < segments; ++i) {
        const int64_t chunk = order[i], count = rows_of[chunk];
        chunks[i] = chunk;
        counts[i] = count;
        request[i] = request_of[chunk];
        if (request[i] < 0 || request[i] >= requests) throw py::index_error("request of a chunk");
        const int64_t* of_chunk = &first_slot[chunk];
        if (count != 1) {
            const auto list = column<int64_t>(slots_of[chunk], "slots");
            check_size(list.size, count, "slots");
            of_chunk = list.data;
        }
        for (int64_t j = 0; j < count; ++j, ++row) {
            const int64_t slot = of_chunk[j];
            const int64_t position = position_of.at(slot, "the token table");
            const int64_t block = position / block_tokens;
            if (position < 0 || block >= width) throw py::index_error("position of a row");
            slots[row] = slot;
            positions[row] = position;
            cache_index[row] =
                pool[request[i] * width + block] * block_tokens + position % block_tokens;
            epochs[row] = epoch_of[slot];
            part_count[row] = part_count_of[slot];
        }
        query_start[i + 1] = row;
        context[i] = positions[row - 1] + 1;
        longest = std::max(longest, context[i]);
    }
    const int64_t blocks = (longest + block_tokens - 1) / block_tokens;
    Fresh<int64_t> block_table(segments, blocks);
    for (py::ssize_t i = 0; i < segments; ++i) {
        std::copy_n(pool + request[i] * width, blocks, block_table.data + i * blocks);
    }
    return py::make_tuple(singles, chunks.array, counts.array, slots.array, epochs.array,
                          part_count.array, query_start.array, positions.array, cache_index.array,
                          context.array, block_table.array, request.array);
}

}  // namespace columns
