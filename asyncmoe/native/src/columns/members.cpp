#include "members.h"

namespace columns {
namespace {

Members* look_up() {
    const auto parcel = [](const char* name) { return Member(names().packed_parcel, name); };
    const auto posted = [](const char* name) { return Member(names().posted, name); };
    const auto arrival = [](const char* name) { return Member(names().arrival, name); };
    return new Members{
        {parcel("kind"), parcel("stage"), parcel("count"), parcel("pairs"), parcel("block"),
         parcel("payload"), parcel("credits"), parcel("described")},
        {posted("source_free"), posted("error"), posted("_callback")},
        {arrival("source"), arrival("parcel"), arrival("release")},
    };
}

}  // namespace

const Members& members() {
    static const Members* const found = look_up();
    return *found;
}

}  // namespace columns
