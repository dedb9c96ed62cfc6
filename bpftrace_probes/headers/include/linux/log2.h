/* BCC includes this file and carries what it needs of it itself. */
#pragma once
